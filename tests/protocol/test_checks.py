"""What web handlers refuse before they store it."""

from __future__ import annotations

import msgspec
import pytest

from archipel.errors import CertificateError, ConsistencyError, MessageError, SecureAggregationError, ShareError
from archipel.protocol import (
    check_advertisement,
    check_confirmation,
    check_shares,
    check_unmasking,
    cohort_digest,
    public_bytes,
    seal,
    survivors_digest,
)
from archipel.protocol.messages import (
    Advertisement,
    Cohort,
    Confirmation,
    EncryptedShare,
    RevealedShare,
    Shares,
    Survivors,
)


@pytest.fixture
def finished(make_round):
    round_ = make_round(4, threshold=3)
    round_.advertise()
    round_.share()
    round_.mask(range(3))
    confirmations = round_.confirm(range(3))
    return round_, confirmations, round_.unmask(confirmations, range(3))


def test_advertisements(finished):
    round_, _, _ = finished
    key = public_bytes(round_.keys[0])
    sealed = round_.advertisements[0]
    checked = check_advertisement(sealed, key, round_.plan.round_id, round_.digest)
    assert checked.plan == round_.digest
    with pytest.raises(CertificateError):
        check_advertisement(sealed, public_bytes(round_.keys[1]), round_.plan.round_id, round_.digest)
    with pytest.raises(SecureAggregationError, match="round"):
        check_advertisement(sealed, key, "0" * 32, round_.digest)
    with pytest.raises(SecureAggregationError, match="plan"):
        check_advertisement(sealed, key, round_.plan.round_id, "0" * 64)
    same = msgspec.structs.replace(checked, cipher_key=checked.mask_key)
    with pytest.raises(SecureAggregationError, match="must differ"):
        check_advertisement(seal("advertisement", same, round_.keys[0]), key, round_.plan.round_id, round_.digest)
    with pytest.raises(MessageError):
        check_advertisement(
            seal("advertisement", round_.plan, round_.keys[0]), key, round_.plan.round_id, round_.digest
        )
    with pytest.raises(CertificateError):
        check_advertisement(seal("confirmation", checked, round_.keys[0]), key, round_.plan.round_id, round_.digest)


def test_shares(finished):
    round_, _, _ = finished
    sender = round_.ids[0]
    good = round_.sent[0].shares
    check_shares(round_.sent[0], sender, round_.ids)
    own = EncryptedShare(peer=sender, ciphertext=good[0].ciphertext)
    longer = EncryptedShare(peer=good[0].peer, ciphertext=good[0].ciphertext + b"\0")
    for shares in (good[1:], [*good, good[0]], [good[0], *good[:2]], [*good[1:], own], [longer, *good[1:]]):
        with pytest.raises(ShareError, match=sender) as caught:
            check_shares(Shares(shares=shares), sender, round_.ids)
        assert caught.value.devices == (sender,)


def test_confirmations(finished):
    round_, confirmations, _ = finished
    cohort = cohort_digest(round_.cohort)
    sealed = confirmations.confirmations[0].confirmation
    key = public_bytes(round_.keys[0])
    round_id, plan = round_.plan.round_id, round_.digest
    assert check_confirmation(sealed, key, round_id, round_.survivors, plan=plan, cohort=cohort).cohort == cohort
    with pytest.raises(CertificateError):
        check_confirmation(sealed, public_bytes(round_.keys[1]), round_id, round_.survivors, plan=plan, cohort=cohort)
    with pytest.raises(SecureAggregationError, match="round"):
        check_confirmation(sealed, key, "0" * 32, round_.survivors, plan=plan, cohort=cohort)
    with pytest.raises(SecureAggregationError, match="cohort"):
        check_confirmation(sealed, key, round_id, round_.survivors, plan=plan, cohort="0" * 64)
    fewer = Survivors(devices=round_.survivors.devices[:2])
    with pytest.raises(ConsistencyError, match="different survivor sets"):
        check_confirmation(sealed, key, round_id, fewer, plan=plan, cohort=cohort)


def test_a_set_of_survivors_has_one_spelling():
    one, two = "a" * 32, "b" * 32
    digest = survivors_digest(Survivors(devices=[one, two]))
    assert digest != survivors_digest(Survivors(devices=[one]))
    for devices in ([two, one], [one, one]):
        with pytest.raises(ConsistencyError, match="sorted"):
            survivors_digest(Survivors(devices=devices))


def test_the_cohort_digest_ignores_the_order_and_nothing_else(make_round):
    round_, again = make_round(3), make_round(3, name="again")
    round_.advertise()
    again.advertise()
    members = round_.cohort.members
    digest = cohort_digest(round_.cohort)
    assert cohort_digest(Cohort(members=members[::-1])) == digest
    assert cohort_digest(Cohort(members=members[:2])) != digest
    assert cohort_digest(again.cohort) != digest


def test_unmaskings(finished):
    round_, _, answers = finished
    answerer, dropped = round_.ids[0], round_.ids[3]
    good = answers[answerer]
    survivors = round_.survivors.devices
    check_unmasking(good, answerer, round_.ids, survivors)

    def refused(**changes: list[RevealedShare]) -> None:
        with pytest.raises(ShareError) as caught:
            check_unmasking(msgspec.structs.replace(good, **changes), answerer, round_.ids, survivors)
        assert caught.value.devices == (answerer,)

    both = RevealedShare(device=dropped, share=good.self_seeds[0].share)
    refused(self_seeds=[*good.self_seeds, both])
    refused(self_seeds=good.self_seeds[1:])
    refused(self_seeds=[good.self_seeds[0], *good.self_seeds[:2]])
    refused(mask_keys=[])
    refused(mask_keys=good.self_seeds[:1])
    refused(mask_keys=[RevealedShare(device=dropped, share=b"\xff" * 33)])
    refused(mask_keys=[RevealedShare(device=dropped, share=bytes(32))])
    with pytest.raises(ShareError, match="not one of the survivors"):
        check_unmasking(good, dropped, round_.ids, survivors)


def test_bodies_are_strict(finished):
    round_, _, _ = finished

    class Wider(Confirmation, frozen=True, kw_only=True):
        more: int = 1

    body = Wider(round_id=round_.plan.round_id, plan="0" * 64, cohort="0" * 64, survivors="0" * 64, more=2)
    with pytest.raises(MessageError, match="more"):
        check_confirmation(
            seal("confirmation", body, round_.keys[0]),
            public_bytes(round_.keys[0]),
            round_.plan.round_id,
            round_.survivors,
            plan="0" * 64,
            cohort="0" * 64,
        )
    assert Advertisement.__struct_config__.forbid_unknown_fields
