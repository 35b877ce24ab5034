"""What bounds the server's messages lets every honest one through, and not much more."""

from __future__ import annotations

import numpy as np
import pytest

from archipel.protocol.messages import MAX_COHORT, RoundPlan
from archipel.protocol.secagg_plus.limits import largest_message
from archipel.protocol.secagg_plus.member import MAX_MEMBER_BYTES
from archipel.protocol.secagg_plus.messages import (
    Inbox,
    Inclusions,
    Invitation,
    Neighbours,
    Packed,
    Partners,
    Question,
    pack,
)
from archipel.protocol.secagg_plus.sizes import Assumptions, Sizes
from tests.support.neighbour_rounds import NeighbourRound, make_terms


def plan_of(cohort: int, sizes: Sizes) -> RoundPlan:
    return RoundPlan(
        round_id="a" * 32, task_id="b" * 32, number=1, bundle="c" * 64, weights="d" * 64, privacy="secure",
        min_cohort=3, max_cohort=cohort, threshold=sizes.threshold, modulus_bits=24, protocol="neighbours",
        neighbours=sizes.neighbours, partners=sizes.partners,
    )  # fmt: skip


def test_messages_of_a_round_are_below_it() -> None:
    count, sizes = 8, Sizes(7, 5, 7)
    plan = plan_of(count, sizes)
    run = NeighbourRound(count, make_terms(sizes, Assumptions(0, 0.1, security=1, correctness=1), count))
    run.open()
    drawn = {place: run.devices[place].draw(run.roster.invite(place)) for place in range(count)}
    messages: list[Packed] = [run.roster.invite(0), run.roster.introduce(0, drawn[0])]
    for place in range(count):
        run.roster.take(place, run.devices[place].deal(run.roster.introduce(place, drawn[place])))
    messages.append(run.roster.inbox(0))
    run.receive(range(count))
    messages.append(run.roster.pair(0, run.sharers))
    run.mask({place: np.zeros(3, np.uint32) for place in range(count)})
    run.answer(range(count))
    messages.append(run.questions[0])
    assert {type(message) for message in messages} == {Invitation, Neighbours, Inbox, Partners, Question}
    for message in messages:
        assert len(pack(message)) <= largest_message(type(message), plan)


@pytest.mark.parametrize("cohort", [3, 100, MAX_COHORT])
def test_the_largest_that_there_can_be_are_just_below_it(cohort: int) -> None:
    k = cohort - 1
    plan = plan_of(cohort, Sizes(k, k // 2 + 1, k))
    # A proof has at most one hash a level for each of its members.
    depth = (cohort - 1).bit_length()
    places = list(range(65536 - k, 65536))
    largest: list[Packed] = [
        Invitation(size=cohort, root=bytes(32), place=cohort - 1),
        Neighbours(members=[bytes(MAX_MEMBER_BYTES)] * cohort, proof=bytes(32 * depth * cohort)),
        Inbox(dealers=places, positions=places, cipher_keys=bytes(32 * k), dealt=bytes(132 * k)),
        Partners(gone=places, others=places, mask_keys=bytes(32 * k)),
        Question(present=places, left=[]),
        Inclusions(neighbours=places, signatures=bytes(64 * k)),
    ]
    for message in largest:
        size, most = len(pack(message)), largest_message(type(message), plan)
        assert size <= most <= 2.5 * size + 100, message.__class__
