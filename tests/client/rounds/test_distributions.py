"""What a device adds to a histogram of an evaluation: one count, of its own model's value on its own examples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from archipel.bundle import Bundle, PrivacyPolicy
from archipel.client.config import AgentConfig
from archipel.client.memory.decisions import DecisionBook
from archipel.client.rounds.work import Prepared, contribute
from archipel.errors import PolicyError
from archipel.lite_runtime import DeviceState
from archipel.protocol.messages import Bins, RoundPlan
from archipel.protocol.policy import check_plan
from archipel.protocol.uploads import BINS, CONTRIBUTORS, plan_layout
from tests.support import simulation as reference
from tests.support.fixtures.strategies import make  # noqa: F401  (fixture)

FINE = Bins(low=0.0, high=8.0, count=100, better="lower")


def plan_of(**changes: object) -> RoundPlan:
    values: dict[str, object] = {
        "round_id": "0" * 32, "task_id": "0" * 32, "number": 1, "bundle": "0" * 64, "weights": "0" * 64,
        "privacy": "plain", "kind": "evaluation", "min_cohort": 10, "max_cohort": 12, "threshold": 1,
        "modulus_bits": 32, "min_contributors": 10, "metrics": {"loss": 8.0}, "distributions": {"loss": FINE},
    }  # fmt: skip
    return RoundPlan(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.sampled(every=4)
def test_a_device_counts_itself_in_the_bin_of_its_own_model(
    make: Callable[..., Bundle],  # noqa: F811
    tmp_path: Path,
) -> None:
    bundle = make("fedper", strategy_options={"personal": "head.*"})
    plan = plan_of()
    prepared = Prepared(bundle, plan_layout(plan, bundle.manifest), bundle.parameters(), {})
    x, y = reference.clients()[2]
    rng = np.random.default_rng(1)
    heads = [
        {},
        {
            "head.weight": rng.standard_normal((3, 5), np.float32) * 3,
            "head.bias": rng.standard_normal(3, np.float32) * 3,
        },
    ]
    places = []
    for own in heads:
        made = contribute(
            prepared, plan, seed=0, fields={"input": x, "label": y}, state=DeviceState(personal=own),
            publisher_keys=[], config=AgentConfig(folder=tmp_path, isolated=False), check=lambda: None,
            decisions=DecisionBook(tmp_path),
        )  # fmt: skip
        module = reference.dense()
        weights = {**reference.tensors(module), **{name: torch.tensor(array).double() for name, array in own.items()}}
        logits = torch.func.functional_call(module.double(), weights, (torch.tensor(x).double(),))
        loss = float(torch.nn.functional.cross_entropy(logits, torch.tensor(y)))
        counts = made.arrays[BINS + "loss"]
        assert counts.sum() == made.arrays[CONTRIBUTORS] == 1
        place = int(np.flatnonzero(counts)[0])
        assert place == 1 + int(loss / 0.08)
        places.append(place)
    assert places[0] != places[1]
    # One without examples is in no bin.
    empty = contribute(
        prepared, plan, seed=0, fields={"input": x[:0], "label": y[:0]}, state=DeviceState(), publisher_keys=[],
        config=AgentConfig(folder=tmp_path, isolated=False), check=lambda: None, decisions=DecisionBook(tmp_path),
    )  # fmt: skip
    assert empty.arrays[BINS + "loss"].sum() == empty.arrays[CONTRIBUTORS] == 0


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"min_contributors": 9}, "min_contributors 9: counts in bins are told of at least 10 devices"),
        ({"kind": "training", "metrics": {}}, "distributions are told by evaluations only"),
    ],
)
def test_a_device_refuses_what_would_tell_of_a_handful(
    make: Callable[..., Bundle],  # noqa: F811
    changes: dict[str, object],
    reason: str,
) -> None:
    policy = PrivacyPolicy(
        modes=("plain",), min_cohort=3, threshold=0.5, max_clip=1000.0, max_bits=24, colluders=0.0, min_contributors=1
    )
    bundle = make("fedavg", privacy=policy)
    honest = plan_of()
    check_plan(honest, policy, plan_layout(honest, bundle.manifest))
    plan = plan_of(**changes)
    with pytest.raises(PolicyError, match=reason):
        check_plan(plan, policy, plan_layout(plan, bundle.manifest))
