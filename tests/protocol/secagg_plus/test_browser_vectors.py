"""A round over neighbours that devices in TypeScript made (web/tests/device_neighbour_round.test.ts).

Python says the same in the place of each, and takes the masks off the sum.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipel.protocol.secagg_plus.member import Session
from archipel.protocol.secagg_plus.messages import Answer, Dealt, Packed, Question, Refused, unpack
from archipel.protocol.secagg_plus.roster import Roster, check_answer
from archipel.protocol.secagg_plus.sizes import Sizes
from archipel.protocol.secagg_plus.unmask import unmask_sum
from tests.protocol.secagg_plus.test_vectors import HONEST, KINDS, participant, replay

FILE = Path(__file__).parents[3] / "vectors" / "browser" / "neighbours.json"
ROUND: dict[str, Any] = json.loads(FILE.read_text())
DEVICES: list[dict[str, Any]] = ROUND["devices"]
LEFT, REPLAYED = 0, 4


@pytest.mark.parametrize("device", DEVICES[:REPLAYED], ids=lambda device: f"place {device['place']}")
def test_python_says_what_the_browser_said(device: dict[str, Any]) -> None:
    begun: list[str] = []
    replay(ROUND, device, HONEST, begun)
    assert begun == list(KINDS)[: 3 if device["place"] == LEFT else 6]


def said(place: int, step: str, kind: type[Packed]) -> Any:
    return unpack(bytes.fromhex(DEVICES[place]["says"][step]), kind)


def test_python_finds_the_sum() -> None:
    acting = participant(ROUND, DEVICES[0], {})
    sizes = acting._terms.sizes
    assert sizes == Sizes(8, 6, 8)
    roster = Roster([bytes.fromhex(device["member"]) for device in DEVICES], sizes)
    for place in range(len(DEVICES)):
        roster.take(place, said(place, "deal", Dealt))
    sharers = roster.settle({place: said(place, "receive", Refused) for place in range(len(DEVICES))})
    assert sharers == set(range(len(DEVICES)))
    survivors = sharers - {LEFT}
    questions = {place: roster.ask(place, survivors) for place in survivors}
    for place in survivors & set(range(REPLAYED)):
        assert unpack(bytes.fromhex(DEVICES[place]["gets"]["confirm"]), Question) == questions[place]
    answers = {place: said(place, "answer", Answer) for place in survivors}
    for place, answer in answers.items():
        check_answer(questions[place], answer, str(place))
    total = unmask_sum(
        np.array(ROUND["masked_sum"], np.uint32), session=Session(acting._terms.session.round_id, ROUND["plan_digest"]),
        roster=roster, sharers=sharers, survivors=survivors, questions=questions, answers=answers, modulus_bits=20,
        threads=1,
    )  # fmt: skip
    assert total.tolist() == np.sum([DEVICES[place]["vector"] for place in survivors], axis=0).tolist()
