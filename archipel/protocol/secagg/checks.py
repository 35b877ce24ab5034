"""What every receiver checks of a message: web handlers before they store it, participants before they act on it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from itertools import pairwise

from archipel.errors import ConsistencyError, MessageError, SecureAggregationError, ShareError
from archipel.protocol.messages import Advertisement, Confirmation, RevealedShare, Shares, Survivors, Unmasking
from archipel.protocol.sealed import MAX_STATEMENT_BYTES, Sealed, encode, unseal
from archipel.protocol.secagg import keys
from archipel.protocol.secagg.envelope import ENVELOPE_BYTES, check_signature
from archipel.protocol.secagg.key_tree import KeyTree
from archipel.protocol.secagg.session import Session
from archipel.protocol.secagg.shamir import decode_share


def survivors_digest(survivors: Survivors) -> str:
    """SHA-256 (hex) over the JSON of U3. Raises ConsistencyError unless the devices are sorted and distinct."""
    devices = survivors.devices
    if any(one >= after for one, after in pairwise(devices)):
        raise ConsistencyError("survivors: device ids must be sorted and distinct, so that a set has one spelling")
    return hashlib.sha256(encode(survivors)).hexdigest()


def check_advertisement(sealed: Sealed, device_key: bytes, round_id: str, plan_digest: str) -> Advertisement:
    """Raises CertificateError, MessageError, or SecureAggregationError when it is for another round or plan, or brings
    a key of small order, with which every private key agrees on zero."""
    advertisement = unseal("advertisement", sealed, device_key, Advertisement, limit=MAX_STATEMENT_BYTES)
    if (advertisement.round_id, advertisement.plan) != (round_id, plan_digest):
        raise SecureAggregationError(
            f"advertisement: expected round {round_id} and plan {plan_digest[:16]}..., "
            f"got round {advertisement.round_id} and plan {advertisement.plan[:16]}..."
        )
    if advertisement.cipher_key == advertisement.mask_key:
        raise SecureAggregationError("advertisement: the cipher key and the mask key must differ")
    for name in ("cipher_key", "mask_key"):
        if keys.is_small_order(getattr(advertisement, name)):
            raise SecureAggregationError(f"advertisement: its {name} is an X25519 public key of small order")
    return advertisement


def check_envelope_keys(advertisement: Advertisement, envelope_keys: bytes, leaves: int) -> KeyTree:
    """The tree of the `leaves` keys. Raises MessageError when they are not those that were advertised, which the device
    need not have sent, and SecureAggregationError when one that it signed is of small order."""
    tree = KeyTree(envelope_keys, leaves)
    if tree.root != advertisement.envelope_root:
        raise MessageError("envelope keys: they are not those under the advertised root")
    for place in range(leaves):
        if keys.is_small_order(tree.key(place)):
            raise SecureAggregationError(f"envelope keys: the one at place {place} is of small order")
    return tree


def check_shares(shares: Shares, sender: str, session: Session) -> None:
    """One signed envelope of the right size for every member of U1 but the sender. Raises ShareError or
    CertificateError."""
    peers = [share.peer for share in shares.shares]
    _require_each_once(f"shares from {sender}", peers, set(session.peers) - {sender}, sender)
    device_key = session.peers[sender].device_key
    for share in shares.shares:
        if len(share.ciphertext) != ENVELOPE_BYTES:
            raise ShareError(
                f"shares from {sender}: {len(share.ciphertext)} bytes for {share.peer}, expected {ENVELOPE_BYTES}",
                [sender],
            )
        check_signature(device_key, share.signature, share.ciphertext, session.associated(sender, share.peer), sender)


def check_confirmation(sealed: Sealed, device_key: bytes, expected: Confirmation) -> Confirmation:
    """Raises CertificateError, MessageError, SecureAggregationError for another round, plan or cohort, or
    ConsistencyError for other survivors or complaints than `expected`."""
    confirmation = unseal("confirmation", sealed, device_key, Confirmation, limit=MAX_STATEMENT_BYTES)
    for name in ("round_id", "plan", "cohort"):
        _require_same(name, confirmation, expected, SecureAggregationError, "it is for another session")
    for name in ("complaints", "survivors"):
        _require_same(name, confirmation, expected, ConsistencyError, f"participants were told different {name}")
    if sealed.body != encode(expected):
        # All confirmations of a round are the same bytes, so that one copy and the signatures prove it to others.
        raise MessageError("confirmation: expected canonical JSON: keys sorted, no blanks")
    return confirmation


def _require_same(
    name: str, found: Confirmation, expected: Confirmation, error: type[SecureAggregationError], meaning: str
) -> None:
    wanted, came = getattr(expected, name), getattr(found, name)
    if wanted != came:
        raise error(f"confirmation: expected {name} {wanted[:16]}..., got {came[:16]}...; {meaning}")


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
