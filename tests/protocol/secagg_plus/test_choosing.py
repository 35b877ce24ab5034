"""Which protocol secure rounds take."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from archipel.bundle.manifest import PrivacyPolicy
from archipel.converter.request import DEFAULT_PRIVACY
from archipel.errors import PolicyError
from archipel.protocol.secagg_plus.choosing import choose_protocol, sizes_between
from archipel.protocol.secagg_plus.sizes import Assumptions, choose_sizes_between

COMPLETE = PrivacyPolicy(modes=("secure",), min_cohort=10, threshold=0.56, max_clip=2.0, max_bits=16, colluders=0.2)
BOTH = replace(COMPLETE, protocols=("complete", "neighbours"))
ALL = replace(COMPLETE, protocols=("complete", "neighbours", "neighbours-mlkem"))


@pytest.mark.parametrize(
    ("policy", "cohort", "asked", "expected"),
    [
        (BOTH, 255, {}, "complete"),
        (BOTH, 256, {}, "neighbours"),
        (BOTH, 256, {"kind": "evaluation"}, "complete"),
        (BOTH, 256, {"threshold": 150}, "complete"),
        (BOTH, 256, {"asked": "complete"}, "complete"),
        (BOTH, 100, {"asked": "neighbours"}, "neighbours"),
        (COMPLETE, 256, {}, "complete"),
        (replace(BOTH, protocols=("neighbours",)), 100, {}, "neighbours"),
        (replace(BOTH, protocols=("neighbours-mlkem",)), 100, {}, "neighbours-mlkem"),
        (replace(BOTH, protocols=("complete", "neighbours-mlkem")), 256, {}, "neighbours-mlkem"),
        (replace(BOTH, protocols=("complete", "neighbours-mlkem")), 255, {}, "complete"),
        # The cheaper one, unless somebody asks for the other.
        (ALL, 256, {}, "neighbours"),
        (ALL, 256, {"asked": "neighbours-mlkem"}, "neighbours-mlkem"),
        # With so many colluders not even all others are enough neighbours.
        (replace(BOTH, colluders=0.7), 256, {}, "complete"),
    ],
)
def test_which_protocol_a_round_takes(policy: PrivacyPolicy, cohort: int, asked: dict[str, Any], expected: str) -> None:
    assert choose_protocol(policy, **{"kind": "training", "cohort": cohort, **asked}) == expected


def test_a_threshold_that_is_the_right_one() -> None:
    sizes = sizes_between(BOTH, 256)
    assert sizes == choose_sizes_between(10, 256, Assumptions(0.2, 0.2, "malicious", hidden=9))
    assert choose_protocol(BOTH, "training", 256, asked="neighbours", threshold=sizes.threshold) == "neighbours"


@pytest.mark.parametrize(
    ("policy", "asked", "why"),
    [
        (COMPLETE, {"asked": "neighbours"}, r"allows \['complete'\], not 'neighbours'"),
        (replace(BOTH, protocols=("neighbours",)), {"kind": "evaluation"}, r"allows \['neighbours'\], not 'complete'"),
        (BOTH, {"asked": "neighbours", "kind": "evaluation"}, "is for trainings"),
        (BOTH, {"asked": "neighbours", "threshold": 3}, "threshold: 3; over neighbours it follows"),
        (replace(BOTH, colluders=0.7), {"asked": "neighbours"}, "cannot be secure"),
        (BOTH, {"asked": "neighbours-mlkem"}, r"allows \['complete', 'neighbours'\], not 'neighbours-mlkem'"),
        (ALL, {"asked": "neighbours-mlkem", "kind": "evaluation"}, "'neighbours-mlkem' is for trainings"),
    ],
)
def test_what_does_not_go_together(policy: PrivacyPolicy, asked: dict[str, Any], why: str) -> None:
    with pytest.raises(PolicyError, match=why):
        choose_protocol(policy, **{"kind": "training", "cohort": 256, **asked})


@pytest.mark.sampled(every=3)
def test_the_sizes_that_operators_are_told() -> None:
    page = Path(__file__).parents[3] / "docs" / "tasks.md"
    text = " ".join(page.read_text(encoding="utf-8").split())
    sentence = re.search(
        r"For 1,000 devices and a third of colluders that is (\d+) neighbours and threshold (\d+), or (\d+) and (\d+) "
        r"with a semi-honest server; with a tenth of both (\d+) and (\d+)",
        text,
    )
    assert sentence is not None
    stated = [int(number) for number in sentence.groups()]
    policies = (
        DEFAULT_PRIVACY,
        replace(DEFAULT_PRIVACY, server="semi-honest"),
        replace(DEFAULT_PRIVACY, colluders=0.1, dropouts=0.1),
    )
    sizes = [sizes_between(policy, 1000) for policy in policies]
    assert stated == [number for each in sizes for number in (each.neighbours, each.threshold)]
