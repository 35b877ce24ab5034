"""What a server or a device may try in a round with ML-KEM, beside what test_lies_of_a_server and _device try."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from archipel.errors import (
    ConsistencyError,
    DealtSharesError,
    MessageError,
    SecureAggregationError,
    ShareError,
    ThresholdError,
)
from archipel.protocol import public_bytes
from archipel.protocol.secagg_plus import kem
from archipel.protocol.secagg_plus.agreement import Draw
from archipel.protocol.secagg_plus.envelope import bind
from archipel.protocol.secagg_plus.hybrid import Hybrid
from archipel.protocol.secagg_plus.member import (
    Distinct,
    Member,
    read_keys,
    read_member,
    shorten,
    sign_member,
    split_keys,
)
from archipel.protocol.secagg_plus.messages import Inbox, Neighbours, Partners
from archipel.protocol.secagg_plus.participant import Participant
from archipel.protocol.secagg_plus.sizes import Assumptions, Sizes
from tests.support.neighbour_rounds import ENROLMENT, SESSION, NeighbourRound, enrolled, make_terms
from tests.support.rounds import fixed

COUNT = 8
SIZES = Sizes(6, 3, 4)
ASSUMED = Assumptions(0, 0.2, "semi-honest", security=1, correctness=1)
ITEM, TOLD = 1220, 1104


def make(step: str, sizes: Sizes = SIZES, assumed: Assumptions = ASSUMED) -> NeighbourRound:
    """A round in which everybody has done what comes before `step`."""
    run = NeighbourRound(COUNT, make_terms(sizes, assumed, COUNT, Hybrid))
    run.open()
    if step in ("receive", "mask"):
        run.deal(range(COUNT))
    if step == "mask":
        run.receive(range(COUNT))
    return run


def finish(run: NeighbourRound, places: set[int]) -> Any:
    """The sum, to which each of `places` gives its place plus one."""
    run.mask({place: np.full(3, place + 1, np.uint32) for place in sorted(places)})
    run.answer(sorted(places))
    return run.unmask()


def total(places: set[int]) -> Any:
    return np.full(3, sum(places) + len(places), np.uint32)


def of_partner(run: NeighbourRound, drawn: int) -> tuple[int, int]:
    """A dealer that has the device as a partner, and at which of its positions, from 0."""
    dealer, position = np.argwhere(run.roster.drawn[:, : SIZES.partners] == drawn)[0]
    return int(dealer), int(position)


# --- the server -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["ciphertext", "commitment", "of another draw", "own K"])
def test_a_substituted_key_of_a_mask_is_refused_and_the_rest_is_the_sum(part: str) -> None:
    run = make("receive")
    dealer, position = of_partner(run, 0)
    offer = run.roster.offers[dealer, position]
    if part == "ciphertext":
        offer[7] ^= 1
    elif part == "commitment":
        offer[TOLD - 1] ^= 1
    elif part == "of another draw":
        # What another dealer sent the same device.
        other, at = (int(number) for number in np.argwhere(run.roster.drawn[:, : SIZES.partners] == 0)[1])
        offer[:TOLD] = run.roster.offers[other, at, :TOLD]
    else:
        # K of the server's, to the device's key, with the commitment that the dealer made.
        offer[:1088] = np.frombuffer(kem.encapsulate(run.roster.keys[0].mask_kem)[1], np.uint8)
    run.receive(range(COUNT))
    assert not run.roster.holds[dealer, position]
    assert dealer in run.sharers
    # An honest server tells both, and none of the two masks: the sum is exact, also where one of them leaves.
    assert 0 in run.roster.pair(dealer, run.sharers).gone
    if dealer not in run.roster.drawn[0, : SIZES.partners]:
        assert dealer not in run.roster.pair(0, run.sharers).others
    stay = run.sharers - {0}
    np.testing.assert_array_equal(finish(run, stay), total(stay))


def test_an_altered_ciphertext_of_an_envelope_is_refused() -> None:
    run = make("receive")
    dealer = int(np.flatnonzero(run.roster.drawn[:, 2] == 0)[0])
    run.roster.dealt[dealer, 2, 3] ^= 1
    run.receive(range(COUNT))
    assert not run.roster.holds[dealer, 2]
    np.testing.assert_array_equal(finish(run, run.sharers), total(run.sharers))


def test_a_key_and_a_commitment_of_the_servers_own_hide_nobody_and_show_nobody() -> None:
    """The server stands between a drawer and the drawn one: it makes K and a commitment that fit, which the drawn one
    takes. Its mask with the drawer is then another one than the drawer's, and the X25519 agreement is in both."""
    run = make("receive")
    dealer, position = of_partner(run, 0)
    agreement = Hybrid(SESSION)
    draw = Draw(bind(SESSION, run.roster.root), dealer, 0)
    own = agreement.private(fixed("the server's"))
    part, sent = agreement.offer(own, run.roster.keys[0], draw)
    run.roster.offers[dealer, position, :TOLD] = np.frombuffer(sent[:TOLD], np.uint8)
    run.receive(range(COUNT))
    assert run.roster.holds[dealer, position]
    device = run.devices[0]
    assert device._state.heard[dealer] == part != run.devices[dealer]._state.parts[0]
    mask = agreement.private(device._state.mask_secret)
    real = agreement.mask_key(mask, run.roster.keys[dealer].mask_key, part, draw, False)
    assert real != agreement.mask_key(own, run.roster.keys[0].mask_key, part, draw, True)
    # The sum is none; whom it shows nobody, for each of its own draws has a mask that the server knows nothing of.
    assert (finish(run, run.sharers) != total(run.sharers)).any()


def test_another_ml_kem_key_of_a_member() -> None:
    for form in ("full", "short"):
        run = make("deal")
        device = run.devices[0]
        honest = run.roster.introduce(0, device.draw(run.roster.invite(0)))
        index = 0 if form == "full" else SIZES.partners
        member = msgspec.msgpack.decode(honest.members[index], type=Member)
        other = kem.public_key(kem.private_key(fixed("kem", 64)))
        keys = member.keys[:96] + other + member.keys[96 + 1184 :] if form == "short" else member.keys[:1280] + other
        members = list(honest.members)
        members[index] = msgspec.msgpack.encode(msgspec.structs.replace(member, keys=keys))
        with pytest.raises(ConsistencyError, match="root"):
            device.deal(Neighbours(members=members, proof=honest.proof))
        # Also where the server put this member under the root: its device has not signed it.
        with pytest.raises(SecureAggregationError, match="left the round"):
            device.receive(run.roster.inbox(0))


def test_members_in_the_wrong_form() -> None:
    key = public_bytes(ENROLMENT)
    run = make("deal")
    full = run.roster.members[0]
    for member, size in ((full, 96), (full, 1312), (shorten(full), 2464), (shorten(full), 96)):
        with pytest.raises(MessageError, match=f"in this round there are {size}"):
            read_member(member, SESSION, key, "plants", keys_bytes=size)
    assert read_member(shorten(full), SESSION, key, "plants", keys_bytes=1312)[1].short == read_keys(full).short
    device = run.devices[0]
    honest = run.roster.introduce(0, device.draw(run.roster.invite(0)))
    # A partner in short: the device could encapsulate nothing to it.
    with pytest.raises(MessageError, match="1312 bytes of keys, in this round there are 2464"):
        device.deal(msgspec.structs.replace(honest, members=[shorten(member) for member in honest.members]))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda keys: {"mask_kem": keys.cipher_kem}, "must differ"),
        (lambda keys: {"mask_kem": b"\xff" * 1184}, "for masks is not an ML-KEM-768 public key"),
        (lambda keys: {"cipher_kem": b"\xff" * 1184}, "for envelopes is not an ML-KEM-768 public key"),
        (lambda keys: {"mask_key": bytes(32)}, "small order"),
    ],
)
def test_keys_that_give_no_secret(change: Any, match: str) -> None:
    identity, chain = enrolled(0)
    good = Participant(make_terms(SIZES, ASSUMED, COUNT, Hybrid), identity, chain, public_bytes(ENROLMENT), fixed_draws)
    good.advertise()
    public = split_keys(good._state.keys)
    member = sign_member(SESSION, replace(public, **change(public)), chain, identity)
    with pytest.raises(SecureAggregationError, match=match):
        read_member(member, SESSION, public_bytes(ENROLMENT), "plants", keys_bytes=2464)


def fixed_draws(count: int) -> bytes:
    fixed_draws.calls = getattr(fixed_draws, "calls", 0) + 1  # type: ignore[attr-defined]
    return fixed(f"draw {fixed_draws.calls}", count)  # type: ignore[attr-defined]


def test_one_ml_kem_key_in_two_members() -> None:
    run = make("deal")
    one, other = run.roster.keys[0], run.roster.keys[1]
    for what in ("cipher_kem", "mask_kem"):
        distinct = Distinct()
        distinct.add_keys(one)
        distinct.add_keys(other)
        with pytest.raises(ConsistencyError, match="occurs twice"):
            distinct.add_keys(replace(run.roster.keys[2], **{what: getattr(one, what)}))


def test_a_partner_of_whom_the_device_has_accepted_nothing() -> None:
    run = make("mask")
    honest = run.roster.pair(0, run.sharers)
    stranger = next(place for place in range(1, COUNT) if place not in honest.others)
    lie = Partners(gone=honest.gone, others=[stranger], mask_keys=run.roster.keys[stranger].mask_key)
    with pytest.raises(ConsistencyError, match="accepted nothing for a mask"):
        run.devices[0].mask(np.zeros(3, np.uint32), lie)
    assert (run.devices[0]._state.parts, run.devices[0]._state.heard) == ({}, {})


@pytest.mark.parametrize("change", [-1, 1, TOLD, -TOLD])
def test_inboxes_of_the_wrong_length(change: int) -> None:
    run = make("receive")
    honest = run.roster.inbox(0)
    data = honest.dealt[:change] if change < 0 else honest.dealt + bytes(change)
    with pytest.raises((MessageError, ValueError)):
        run.devices[0].receive(
            Inbox(dealers=honest.dealers, positions=honest.positions, cipher_keys=honest.cipher_keys, dealt=data)
        )


def test_cutting_draws_off_ends_the_participation_before_it_masks() -> None:
    """A malicious server says that partners refused. Where too few are left to hide the device, it leaves."""
    sizes, assumed = Sizes(6, 5, 6), Assumptions(0, 0.1, "malicious", hidden=2, security=1, correctness=1)
    run = make("mask", sizes, assumed)
    drawn = run.roster.drawn[0].tolist()
    honest = run.roster.pair(0, run.sharers)
    with pytest.raises(ThresholdError, match="4 of 6 are still there, 5 are needed"):
        run.devices[0].mask(np.zeros(3, np.uint32), msgspec.structs.replace(honest, gone=sorted(drawn[:2])))


# --- devices ----------------------------------------------------------------------------------------------------------


def lying(run: NeighbourRound, liar: int, accomplice: int | None = None) -> None:
    """Everybody deals and receives; what `liar` sent was changed by now. `accomplice` accepts it whatever it is."""
    refused = {place: run.devices[place].receive(run.roster.inbox(place)) for place in range(COUNT)}
    if accomplice is not None:
        assert liar in refused[accomplice].dealers
        refused[accomplice] = msgspec.structs.replace(
            refused[accomplice], dealers=[dealer for dealer in refused[accomplice].dealers if dealer != liar]
        )
        run.devices[accomplice]._state.heard[liar] = bytes(32)
    run.sharers = run.roster.settle(refused)
    assert run.sharers == set(range(COUNT))


def test_what_was_left_behind_is_not_what_was_sent() -> None:
    run = make("receive")
    run.roster.offers[2, 1, -1] ^= 1
    partner = int(run.roster.drawn[2, 1])
    lying(run, 2)
    # While both stay, nobody looks at it. When the one that drew leaves, the sum fails, and it is to blame.
    stay = set(range(COUNT)) - {2}
    assert partner in stay
    with pytest.raises(DealtSharesError, match="committed to") as raised:
        finish(run, stay)
    assert raised.value.devices == ("2",)


def test_a_ciphertext_that_does_not_fit_with_an_accomplice_that_accepts_it() -> None:
    run = make("receive")
    dealer, position = of_partner(run, 0)
    run.roster.offers[dealer, position, 0] ^= 1
    lying(run, dealer, accomplice=0)
    # The accomplice leaves: its own keys show what its dealer sent.
    with pytest.raises(DealtSharesError) as raised:
        finish(run, set(range(1, COUNT)))
    assert raised.value.devices == (str(dealer),)


def test_an_ml_kem_key_that_does_not_follow_from_the_shared_secret() -> None:
    run = NeighbourRound(COUNT, make_terms(SIZES, ASSUMED, COUNT, Hybrid))
    liar = run.devices[5]
    publish = liar._agreement.publish

    def another(cipher: Any, mask: Any, digest: bytes) -> Any:
        return replace(publish(cipher, mask, digest), mask_kem=kem.public_key(kem.private_key(fixed("kem", 64))))

    liar._agreement.publish = another  # type: ignore[method-assign]
    run.open()
    run.deal(range(COUNT))
    refused = {place: run.devices[place].receive(run.roster.inbox(place)) for place in range(COUNT)}
    # It cannot open what was sent to it, and says nothing of that.
    run.sharers = run.roster.settle({**refused, 5: msgspec.structs.replace(refused[5], dealers=[])})
    with pytest.raises(ShareError, match="dealt wrong ones") as raised:
        finish(run, set(range(COUNT)) - {5})
    assert raised.value.devices == ("5",)


def test_dealt_of_another_length() -> None:
    run = make("deal")
    device = run.devices[0]
    honest = device.deal(run.roster.introduce(0, device.draw(run.roster.invite(0))))
    for data in (honest.dealt[:-1], honest.dealt + b"\0", honest.dealt[: ITEM * SIZES.neighbours]):
        with pytest.raises(MessageError, match="expected 6 times 1220 and 4 times 1152 bytes"):
            run.roster.check_dealt(0, msgspec.structs.replace(honest, dealt=data))
    run.roster.check_dealt(0, honest)
