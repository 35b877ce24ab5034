"""What a participant refuses. Most refusals are committed as vectors; here are those that need another set-up."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from archipel.errors import (
    CertificateError,
    ConsistencyError,
    MessageError,
    PolicyError,
    ProtocolError,
    SecureAggregationError,
    ShareError,
    ThresholdError,
)
from archipel.protocol import Participant, Sealed, encode, seal
from archipel.protocol.identity import extend_chain, rotation_request
from archipel.protocol.messages import Advertisement, Cohort, Confirmations, Confirmed, Member, RoundPlan, Shares


def test_a_plain_plan_or_a_cohort_of_one_is_no_secure_round(make_round):
    with pytest.raises(PolicyError, match="secure"):
        make_round(3, privacy="plain")
    with pytest.raises(PolicyError, match="at least 2"):
        make_round(3, min_cohort=1)


def test_the_chain_must_be_ones_own(make_round):
    round_ = make_round(3)
    with pytest.raises(CertificateError, match="another identity key"):
        Participant(round_.plan, round_.digest, round_.keys[0], round_.chains[1], round_.enrolment_key, bytes)
    with pytest.raises(CertificateError):
        Participant(round_.plan, round_.digest, round_.keys[0], round_.chains[0], bytes(32), bytes)
    with pytest.raises(MessageError, match="64"):
        Participant(round_.plan, "ff", round_.keys[0], round_.chains[0], round_.enrolment_key, bytes)


def test_threshold_must_be_more_than_half_of_the_cohort(make_round):
    round_ = make_round(6, threshold=3)
    round_.advertise()
    with pytest.raises(ThresholdError, match="two groups"):
        round_.devices[0].share(round_.cohort)
    smaller = make_round(6, threshold=3)
    smaller.advertise(range(5))
    smaller.share(range(5))


def test_cohort_larger_than_the_plan_allows(make_round):
    round_ = make_round(4, threshold=3, max_cohort=3)
    round_.advertise()
    with pytest.raises(ConsistencyError, match="allows 3"):
        round_.devices[0].share(round_.cohort)


def test_cohort_below_the_minimum(make_round):
    round_ = make_round(5, threshold=3, min_cohort=5)
    round_.advertise(range(4))
    with pytest.raises(ThresholdError, match="needs 5"):
        round_.devices[0].share(round_.cohort)


def test_own_shares_do_not_come_from_outside(make_round):
    round_ = make_round(3, threshold=2)
    round_.advertise()
    round_.share()
    inbox = round_.inbox(0)
    own = msgspec.structs.replace(inbox.shares[0], peer=round_.ids[0])
    with pytest.raises(ShareError, match="not a peer"):
        round_.devices[0].complain(Shares(shares=[own, *inbox.shares]))


def test_survivors_below_the_minimum(make_round):
    round_ = make_round(5, threshold=3, min_cohort=4)
    round_.advertise()
    round_.share()
    round_.mask(range(3))
    with pytest.raises(ThresholdError, match="needs 4"):
        round_.devices[0].confirm(round_.survivors)


@pytest.mark.parametrize(
    ("certificate", "error"), [({"population": "staff"}, CertificateError), ({"kind": "aggregator"}, ConsistencyError)]
)
def test_members_are_of_the_same_population_and_kind(make_round, certificate, error):
    round_ = make_round(3)
    round_.advertise()
    members = round_.cohort.members
    foreign = Member(chain=round_.chain(1, **certificate), advertisement=members[1].advertisement)
    with pytest.raises(error):
        round_.devices[0].share(Cohort(members=[members[0], foreign, members[2]]))


def test_one_token_is_one_participant(make_round, signing_key):
    # Who holds a token could sign any number of devices with it: together they would still be one voice.
    round_ = make_round(3)
    round_.advertise()
    members = round_.cohort.members
    twin = Member(chain=round_.chain(1, token=2), advertisement=members[1].advertisement)
    with pytest.raises(ConsistencyError, match="enrolment token"):
        round_.devices[0].share(Cohort(members=[members[0], twin, members[2]]))


def test_one_device_with_two_tokens_is_one_participant(make_round):
    round_ = make_round(3)
    round_.advertise()
    members = round_.cohort.members
    again = Member(chain=round_.chain(2, token=7), advertisement=members[2].advertisement)
    with pytest.raises(ConsistencyError, match="in it twice"):
        round_.devices[0].share(Cohort(members=[*members, again]))


def test_peers_that_were_told_another_cohort_cannot_open_each_others_shares(make_round):
    round_ = make_round(5, threshold=3)
    round_.advertise()
    whole = round_.cohort
    round_.share([0, 1, 2])
    round_.cohort = Cohort(members=whole.members[:4])
    round_.share([3])
    # Nobody is accused: that device signed for the cohort that it was told.
    with pytest.raises(CertificateError, match="another cohort"):
        round_.devices[0].complain(round_.inbox(0))


def test_own_advertisement_replaced_by_an_older_one(make_round):
    old = make_round(3, name="yesterday")
    round_ = make_round(3)
    old.advertise()
    round_.advertise()
    members = round_.cohort.members
    with pytest.raises(ConsistencyError, match="keys that it advertised"):
        round_.devices[0].share(Cohort(members=[old.cohort.members[0], *members[1:]]))


def test_confirmations_of_an_earlier_attempt_at_the_same_plan_count_nothing(make_round):
    first, second = make_round(3, threshold=2, name="first"), make_round(3, threshold=2, name="second")
    for round_ in (first, second):
        round_.advertise()
        round_.share()
        round_.mask()
    assert first.digest == second.digest
    assert first.survivors == second.survivors
    replayed = first.confirm()
    second.confirm()
    with pytest.raises(SecureAggregationError, match="cohort"):
        second.devices[0].unmask(replayed)


@pytest.mark.parametrize(
    "vector",
    [
        np.zeros(20, np.int64),
        np.zeros((4, 5), np.uint32),
        np.full(20, 2**24, np.uint32),
        [0] * 20,
    ],
)
def test_a_vector_that_is_not_encoded_ends_the_participation(make_round, vector):
    round_ = make_round(3)
    round_.advertise()
    round_.share()
    complaints = round_.complain()
    with pytest.raises(ProtocolError):
        round_.devices[0].mask(vector, complaints)
    with pytest.raises(SecureAggregationError, match="left the round"):
        round_.devices[0].mask(round_.vectors[0], complaints)


def test_short_randomness_is_refused(make_round):
    round_ = make_round(3)
    device = Participant(
        round_.plan, round_.digest, round_.keys[0], round_.chains[0], round_.enrolment_key, lambda n: bytes(n - 1)
    )
    with pytest.raises(SecureAggregationError, match="randomness"):
        device.advertise()


def test_every_peer_gets_another_key_and_every_sender_signs(make_round, signing_key):
    round_ = make_round(4)
    round_.advertise()
    bodies = [msgspec.json.decode(m.advertisement.body, type=Advertisement) for m in round_.cohort.members]
    assert len({key for body in bodies for key in (body.cipher_key, body.mask_key)}) == 8
    forged = seal("advertisement", bodies[1], signing_key("device 2"))
    members = round_.cohort.members
    with pytest.raises(CertificateError):
        round_.devices[0].share(
            Cohort(members=[members[0], Member(chain=round_.chains[1], advertisement=forged), *members[2:]])
        )


def secrets_of(device: Participant) -> list[bytes]:
    found: list[bytes] = []

    def walk(value: object) -> None:
        if isinstance(value, bytes):
            found.append(value)
        elif isinstance(value, dict):
            for item in value.values():
                walk(item)
        elif isinstance(value, tuple):
            for item in value:
                walk(item)

    for name in ("_cipher_secret", "_mask_secret", "_envelope_secret", "_seed", "_held"):
        walk(getattr(device, name))
    return [secret for secret in found if secret]


def test_secrets_go_as_soon_as_they_may(make_round):
    round_ = make_round(3, threshold=2)
    device = round_.devices[0]
    round_.advertise()
    round_.share()
    assert len(secrets_of(device)) == 3 + 2
    assert not any(secret.hex() in repr(device) for secret in secrets_of(device))
    round_.mask()
    # Only the shares that the device may have to reveal: its own two and two of each peer.
    assert sorted(len(secret) for secret in secrets_of(device)) == [33] * 6
    round_.unmask(round_.confirm())
    assert secrets_of(device) == []


def test_a_failed_step_drops_the_secrets(make_round):
    round_ = make_round(3, threshold=2)
    round_.advertise()
    with pytest.raises(ConsistencyError):
        round_.devices[0].share(Cohort(members=round_.cohort.members[1:]))
    assert secrets_of(round_.devices[0]) == []
    with pytest.raises(SecureAggregationError, match="left the round"):
        round_.devices[0].share(round_.cohort)


def test_one_kind_of_share_for_every_sharer(make_round):
    round_ = make_round(5, threshold=3)
    round_.advertise()
    round_.share(range(4))
    round_.mask([0, 1, 3])
    answer = round_.devices[0].unmask(round_.confirm([0, 1, 3]))
    seeds = [share.device for share in answer.self_seeds]
    keys = [share.device for share in answer.mask_keys]
    assert sorted(seeds) == sorted(round_.ids[i] for i in (0, 1, 3))
    assert keys == [round_.ids[2]]
    assert "share=..." in repr(answer)
    assert repr(answer.self_seeds[0].share) not in repr(answer)


def test_plan_digest_is_what_binds_the_round(make_round):
    # The same plan sealed with other bytes: devices that hold different plans never meet in one cohort.
    round_, other = make_round(3), make_round(3, hyperparameters={"lr": 0.1})
    assert isinstance(other.plan, RoundPlan)
    assert encode(other.plan) != encode(round_.plan)
    round_.advertise()
    other.advertise()
    mixed = Cohort(members=[round_.cohort.members[0], other.cohort.members[1], round_.cohort.members[2]])
    with pytest.raises(SecureAggregationError, match="plan"):
        round_.devices[0].share(mixed)


def rotate(round_, index: int, signing_key, name: str = "next"):
    """Device `index` of a round that has not begun replaces its key."""
    new = signing_key(name)
    request = rotation_request(round_.chains[index], round_.keys[index], new, b"s" * 32)
    round_.chains[index] = extend_chain(round_.chains[index], request.certificate)
    round_.keys[index] = new
    round_.devices[index] = round_.participant(index, "round")


def test_a_round_with_devices_that_replaced_their_keys(make_round, signing_key):
    round_ = make_round(4)
    rotate(round_, 1, signing_key)
    rotate(round_, 1, signing_key, "next but one")
    rotate(round_, 2, signing_key, "another")
    assert [device.device_id for device in round_.devices] == round_.ids
    round_.advertise()
    round_.share()
    round_.mask([0, 1, 3])  # one of them drops out
    confirmations = round_.confirm([0, 1, 3])
    answers = round_.unmask(confirmations, [0, 1, 3])
    assert round_.sum(answers).tolist() == round_.plain_sum()


def test_what_the_old_key_signs_counts_nothing(make_round, signing_key):
    round_ = make_round(3)
    old = round_.devices[1]
    rotate(round_, 1, signing_key)
    round_.advertise()
    stale = Member(chain=round_.chains[1], advertisement=old.advertise().advertisement)
    cohort = Cohort(members=[round_.cohort.members[0], stale, round_.cohort.members[2]])
    with pytest.raises(CertificateError, match="advertisement"):
        round_.devices[0].share(cohort)


def test_one_device_with_its_old_and_its_new_chain_is_one_participant(make_round, signing_key):
    round_ = make_round(4)
    chain, device = round_.chains[1], round_.devices[1]
    rotate(round_, 1, signing_key)
    round_.advertise()
    both = Cohort(members=[*round_.cohort.members, Member(chain=chain, advertisement=device.advertise().advertisement)])
    with pytest.raises(ConsistencyError, match="shares its enrolment token"):
        round_.devices[0].share(both)


def test_two_devices_do_not_share_a_key(make_round, signing_key):
    round_ = make_round(4)
    for index in (1, 2):
        rotate(round_, index, signing_key, "the same")
    round_.advertise()
    with pytest.raises(ConsistencyError, match=r"device key .* occurs twice"):
        round_.devices[0].share(round_.cohort)


@pytest.mark.parametrize("what", ["advertisement", "confirmation"])
def test_statements_for_all_peers_are_small(make_round, what):
    round_ = make_round(3)
    round_.advertise()
    if what == "advertisement":
        member = round_.cohort.members[1]
        body = member.advertisement.body.ljust(3000)
        sealed = Sealed(body=body, signature=round_.keys[1].sign(b"archipel/v1/advertisement\0" + body))
        members = list(round_.cohort.members)
        members[1] = msgspec.structs.replace(member, advertisement=sealed)
        with pytest.raises(MessageError, match="3000 bytes"):
            round_.devices[0].share(Cohort(members=members))
        return
    round_.share()
    round_.mask()
    confirmations = round_.confirm()
    item = confirmations.confirmations[1]
    body = item.confirmation.body.ljust(3000)
    sealed = Sealed(body=body, signature=round_.keys[1].sign(b"archipel/v1/confirmation\0" + body))
    changed = [confirmations.confirmations[0], Confirmed(device=item.device, confirmation=sealed)]
    with pytest.raises(MessageError, match="3000 bytes"):
        round_.devices[0].unmask(Confirmations(confirmations=[*changed, confirmations.confirmations[2]]))
