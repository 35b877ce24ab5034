"""What every receiver checks of a message: web handlers before they store it, participants before they act on it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from itertools import pairwise

from archipel.errors import ConsistencyError, MessageError, SecureAggregationError, ShareError
from archipel.protocol.messages import Advertisement, Confirmation, RevealedShare, Shares, Survivors, Unmasking
from archipel.protocol.sealed import MAX_STATEMENT_BYTES, Sealed, encode, unseal
from archipel.protocol.secagg.envelope import ENVELOPE_BYTES
from archipel.protocol.secagg.shamir import decode_share


def survivors_digest(survivors: Survivors) -> str:
    """SHA-256 (hex) over the JSON of U3. Raises ConsistencyError unless the devices are sorted and distinct."""
    devices = survivors.devices
    if any(one >= after for one, after in pairwise(devices)):
        raise ConsistencyError("survivors: device ids must be sorted and distinct, so that a set has one spelling")
    return hashlib.sha256(encode(survivors)).hexdigest()


def check_advertisement(sealed: Sealed, device_key: bytes, round_id: str, plan_digest: str) -> Advertisement:
    """Raises CertificateError, MessageError, or SecureAggregationError when it is for another round or plan."""
    advertisement = unseal("advertisement", sealed, device_key, Advertisement, limit=MAX_STATEMENT_BYTES)
    if (advertisement.round_id, advertisement.plan) != (round_id, plan_digest):
        raise SecureAggregationError(
            f"advertisement: expected round {round_id} and plan {plan_digest[:16]}..., "
            f"got round {advertisement.round_id} and plan {advertisement.plan[:16]}..."
        )
    if advertisement.cipher_key == advertisement.mask_key:
        raise SecureAggregationError("advertisement: the cipher key and the mask key must differ")
    return advertisement


def check_shares(shares: Shares, sender: str, members: Collection[str]) -> None:
    """One envelope of the right size for every member of U1 but the sender. Raises ShareError."""
    peers = [share.peer for share in shares.shares]
    _require_each_once(f"shares from {sender}", peers, set(members) - {sender}, sender)
    for share in shares.shares:
        if len(share.ciphertext) != ENVELOPE_BYTES:
            raise ShareError(
                f"shares from {sender}: {len(share.ciphertext)} bytes for {share.peer}, expected {ENVELOPE_BYTES}",
                [sender],
            )


def check_confirmation(
    sealed: Sealed, device_key: bytes, round_id: str, survivors: Survivors, *, plan: str, cohort: str
) -> Confirmation:
    """`plan` is `policy.plan_digest`, `cohort` is `cohort_digest`. Raises CertificateError, MessageError, or
    ConsistencyError for other survivors."""
    confirmation = unseal("confirmation", sealed, device_key, Confirmation, limit=MAX_STATEMENT_BYTES)
    if (confirmation.round_id, confirmation.plan, confirmation.cohort) != (round_id, plan, cohort):
        raise SecureAggregationError(
            f"confirmation: expected round {round_id}, plan {plan[:16]}... and cohort {cohort[:16]}..., got round "
            f"{confirmation.round_id}, plan {confirmation.plan[:16]}... and cohort {confirmation.cohort[:16]}..."
        )
    if encode(confirmation) != sealed.body:
        # All confirmations of a round are the same bytes, so that one copy and the signatures prove it to others.
        raise MessageError("confirmation: expected canonical JSON: keys sorted, no blanks")
    expected = survivors_digest(survivors)
    if confirmation.survivors != expected:
        raise ConsistencyError(
            f"confirmation: expected survivors {expected[:16]}..., got {confirmation.survivors[:16]}...; "
            "participants were told different survivor sets"
        )
    return confirmation


def check_unmasking(message: Unmasking, answerer: str, sharers: Collection[str], survivors: Collection[str]) -> None:
    """Of each survivor (U3) the share of the seed, of each dropped sharer (U2 - U3) that of the mask key; no more.

    Raises ShareError.
    """
    if answerer not in survivors:
        raise ShareError(f"unmasking from {answerer}: it is not one of the survivors", [answerer])
    where = f"unmasking from {answerer}"
    seeds = [share.device for share in message.self_seeds]
    keys = [share.device for share in message.mask_keys]
    _require_each_once(f"{where}: self_seeds", seeds, set(survivors), answerer)
    _require_each_once(f"{where}: mask_keys", keys, set(sharers) - set(survivors), answerer)
    for revealed in (*message.self_seeds, *message.mask_keys):
        _check_revealed(where, answerer, revealed)


def _check_revealed(where: str, answerer: str, revealed: RevealedShare) -> None:
    try:
        decode_share(revealed.share)
    except ShareError as error:
        raise ShareError(f"{where}: for {revealed.device}: {error}", [answerer]) from None


def _require_each_once(where: str, devices: Sequence[str], expected: set[str], blamed: str) -> None:
    if len(devices) == len(expected) and set(devices) == expected:
        return
    missing, foreign = sorted(expected - set(devices)), sorted(set(devices) - expected)
    raise ShareError(
        f"{where}: expected one for each of {len(expected)} devices, got {len(devices)}; "
        f"missing {missing[:3]}, not asked for {foreign[:3]}",
        [blamed],
    )
