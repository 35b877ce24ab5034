"""What a device of a round over neighbours may send, and who gets the blame."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from archipel.errors import MessageError, ProtocolError, ShareError
from archipel.protocol.secagg_plus import participant
from archipel.protocol.secagg_plus.envelope import DEALT_BYTES
from archipel.protocol.secagg_plus.messages import Dealt, Drawn, Refused, pack, unpack
from archipel.protocol.secagg_plus.roster import check_answer
from archipel.protocol.secagg_plus.shares import SHARE_BYTES
from archipel.protocol.secagg_plus.sizes import Assumptions, Sizes
from tests.support.neighbour_rounds import NeighbourRound, make_terms

COUNT = 8
SIZES = Sizes(5, 3, 5)
ASSUMED = Assumptions(0, 0.2, "semi-honest", security=1, correctness=1)


def make(step: str) -> NeighbourRound:
    run = NeighbourRound(COUNT, make_terms(SIZES, ASSUMED, COUNT))
    run.open()
    if step != "deal":
        run.deal(range(COUNT))
    if step in ("mask", "answer"):
        run.receive(range(COUNT))
    if step == "answer":
        run.mask({place: np.full(3, place, np.uint32) for place in range(COUNT) if place != 7})
        run.answer(range(7))
    return run


def test_a_wrong_share_is_blamed_on_its_holder_even_with_exactly_the_threshold() -> None:
    run = make("answer")
    # Of dealer 0 exactly the threshold answered: the others that hold its shares are left out.
    holders = [place for place in run.roster.drawn[0].tolist() if place != 7]
    liar = holders[0]
    for out in holders[SIZES.threshold :]:
        del run.answers[out]
    at = run.questions[liar].present.index(0) * SHARE_BYTES
    seeds = bytearray(run.answers[liar].seeds)
    seeds[at] ^= 1
    run.answers[liar] = msgspec.structs.replace(run.answers[liar], seeds=bytes(seeds))
    check_answer(run.questions[liar], run.answers[liar], str(liar))
    with pytest.raises(ShareError) as raised:
        run.unmask()
    assert raised.value.devices == (str(liar),)


def test_a_wrong_share_of_a_mask_key_is_blamed_and_the_rest_give_the_sum() -> None:
    run = make("answer")
    liar = next(place for place in run.roster.drawn[7].tolist())
    keys = bytearray(run.answers[liar].mask_keys)
    keys[-1] ^= 1
    honest = run.answers[liar]
    run.answers[liar] = msgspec.structs.replace(honest, mask_keys=bytes(keys))
    with pytest.raises(ShareError) as raised:
        run.unmask()
    assert raised.value.devices == (str(liar),)
    del run.answers[liar]
    np.testing.assert_array_equal(run.unmask(), np.full(3, sum(range(7)), np.uint32))


def test_shares_of_no_polynomial_are_blamed_on_their_dealer(monkeypatch: pytest.MonkeyPatch) -> None:
    run = NeighbourRound(COUNT, make_terms(SIZES, ASSUMED, COUNT))
    run.open()
    split = participant.shares.split

    def garble(*given: Any) -> list[bytes]:
        # Its commitments are to these shares, so holders accept them.
        return [bytes([share[0] ^ (index % 2)]) + share[1:] for index, share in enumerate(split(*given))]

    monkeypatch.setattr(participant.shares, "split", garble)
    run.deal([2])
    monkeypatch.undo()
    run.deal([place for place in range(COUNT) if place != 2])
    run.receive(range(COUNT))
    assert run.sharers == set(range(COUNT))
    run.mask({place: np.full(3, place, np.uint32) for place in range(COUNT)})
    run.answer(range(COUNT))
    with pytest.raises(ShareError) as raised:
        run.unmask()
    assert raised.value.devices == ("2",)


def test_a_dealer_whose_envelopes_do_not_open_is_out_before_anybody_masks_with_it() -> None:
    run = make("deal")
    run.deal([place for place in range(COUNT) if place != 4])
    device = run.devices[4]
    drawn = device.draw(run.roster.invite(4))
    sent = device.deal(run.roster.introduce(4, drawn))
    good = sent.dealt
    # Every other envelope is garbled, so three of five do not open.
    for position in range(0, SIZES.neighbours, 2):
        at = DEALT_BYTES * position + 20
        good = good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]
    run.roster.take(4, Dealt(places=sent.places, dealt=good))
    run.receive(range(COUNT))
    assert run.sharers == set(range(COUNT)) - {4}
    run.mask({place: np.full(3, 1, np.uint32) for place in run.sharers})
    run.answer(run.sharers)
    np.testing.assert_array_equal(run.unmask(), np.full(3, COUNT - 1, np.uint32))


def test_commitments_to_other_shares_are_refused() -> None:
    run = make("deal")
    run.deal(range(COUNT))
    holder = int(run.roster.drawn[4, 0])
    run.roster.dealt[4, 0, -1] ^= 1
    assert run.devices[holder].receive(run.roster.inbox(holder)).dealers == [4]


def test_a_coalition_that_refuses_a_dealer_needs_many_of_its_holders() -> None:
    run = make("receive")
    refused = {place: run.devices[place].receive(run.roster.inbox(place)) for place in range(COUNT)}
    one = run.roster.drawn[0].tolist()[0]
    refused[one] = Refused(dealers=[0])
    assert run.roster.settle(refused) == set(range(COUNT))


def test_answers_of_a_wrong_form() -> None:
    run = make("answer")
    question, answer = run.questions[0], run.answers[0]
    for wrong, match in (
        ({"seeds": answer.seeds[:-1]}, "bytes of seeds"),
        ({"mask_keys": answer.mask_keys + bytes(36)}, "bytes of mask_keys"),
        ({"seeds": b"\xff" * len(answer.seeds)}, "above the field"),
    ):
        with pytest.raises(ShareError, match=match) as raised:
            check_answer(question, msgspec.structs.replace(answer, **wrong), "device")
        assert raised.value.devices == ("device",)


def test_neighbours_that_nobody_can_have_drawn() -> None:
    run = make("deal")
    for places in ([1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [1, 1, 2, 3, 4], [0, 1, 2, 3, 4], [1, 2, 3, 4, COUNT]):
        with pytest.raises(MessageError, match="drawn"):
            run.roster.introduce(0, Drawn(places=places))
        with pytest.raises(MessageError, match="drawn"):
            run.roster.take(0, Dealt(places=places, dealt=bytes(DEALT_BYTES * len(places))))
    places = [1, 2, 3, 4, 5]
    with pytest.raises(MessageError, match="expected 5 times"):
        run.roster.take(0, Dealt(places=places, dealt=bytes(DEALT_BYTES * 4)))
    run.roster.take(0, Dealt(places=places, dealt=bytes(DEALT_BYTES * 5)))
    with pytest.raises(MessageError, match="dealt before"):
        run.roster.take(0, Dealt(places=places, dealt=bytes(DEALT_BYTES * 5)))


def test_a_vector_that_does_not_fit_the_plan_stays_on_the_device() -> None:
    run = make("mask")
    with pytest.raises(ProtocolError):
        run.devices[0].mask(np.full(3, 1 << 24, np.uint32), run.roster.pair(0, run.sharers))


@pytest.mark.parametrize(
    "data", [b"", b"\xc0", b"\x91", b"\x91\x91\xff", b"\x92\x90\x90", b"\x81\xa1a\x01", b"\xdc\xff\xff"]
)
def test_messages_are_decoded_strictly(data: bytes) -> None:
    with pytest.raises(MessageError, match="Refused"):
        unpack(data, Refused)


def test_messages_survive_the_way() -> None:
    assert unpack(pack(Refused(dealers=[3, 65_535])), Refused) == Refused(dealers=[3, 65_535])
    with pytest.raises(MessageError):
        unpack(pack(Refused(dealers=[65_536])), Refused)
