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
    """SHA-256 (hex) over the JSON of U3, the set of survivors.

    Raises ConsistencyError unless the devices are sorted and distinct.
    """
    devices = survivors.devices
    if any(one >= after for one, after in pairwise(devices)):
        raise ConsistencyError("survivors: device ids must be sorted and distinct, so that a set has one spelling")
    return hashlib.sha256(encode(survivors)).hexdigest()


def check_advertisement(sealed: Sealed, device_key: bytes, round_id: str, plan_digest: str) -> Advertisement:
    """The advertisement, verified with the raw 32-byte `device_key`.

    Raises CertificateError or MessageError where the signature or the JSON is wrong, SecureAggregationError where it
    is for another round or plan or has a key of small order, with which every private key agrees on zero.
    """
    advertisement = unseal("advertisement", sealed, device_key, Advertisement, limit=MAX_STATEMENT_BYTES)
    if (advertisement.round_id, advertisement.plan) != (round_id, plan_digest):
        raise SecureAggregationError(
            f"advertisement: expected round {round_id} and plan {plan_digest[:16]}..., "
            f"got round {advertisement.round_id} and plan {advertisement.plan[:16]}..."
        )
    # When a device drops out, the server reconstructs its mask key. Were that also its cipher key, the server could
    # open the device's envelopes, take the seed's shares from them and unmask the device's vector.
    if advertisement.cipher_key == advertisement.mask_key:
        raise SecureAggregationError("advertisement: the cipher key and the mask key must differ")
    for name in ("cipher_key", "mask_key"):
        if keys.is_small_order(getattr(advertisement, name)):
            raise SecureAggregationError(f"advertisement: its {name} is an X25519 public key of small order")
    return advertisement


def check_envelope_keys(advertisement: Advertisement, envelope_keys: bytes, leaves: int) -> KeyTree:
    """The tree of the `leaves` keys, 32 bytes each, one after the other.

    Raises MessageError when they are not the advertised ones, SecureAggregationError when one is of small order.
    """
    tree = KeyTree(envelope_keys, leaves)
    # The root first: the device signed only that. Keys under another root may come from somebody else, so they are no
    # fault of the device; a key of small order under its own root is.
    if tree.root != advertisement.envelope_root:
        raise MessageError("envelope keys: they are not those under the advertised root")
    for place in range(leaves):
        if keys.is_small_order(tree.key(place)):
            raise SecureAggregationError(f"envelope keys: the one at place {place} is of small order")
    return tree


def check_shares(shares: Shares, sender: str, session: Session) -> None:
    """There must be one signed envelope of the right size for every member of U1 (`session.peers`) but the sender.

    Raises ShareError, which blames the sender, or CertificateError, which blames nobody.
    """
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
    """The confirmation, verified with the raw 32-byte `device_key`; it must say the same as `expected`.

    Raises CertificateError, MessageError, SecureAggregationError for another round, plan or cohort, or
    ConsistencyError for other survivors or complaints.
    """
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
    name: str, confirmation: Confirmation, expected: Confirmation, error: type[SecureAggregationError], meaning: str
) -> None:
    required, actual = getattr(expected, name), getattr(confirmation, name)
    if required != actual:
        raise error(f"confirmation: expected {name} {required[:16]}..., got {actual[:16]}...; {meaning}")


def check_unmasking(message: Unmasking, answerer: str, sharers: Collection[str], survivors: Collection[str]) -> None:
    """The answer must have a share of each survivor's seed (U3) and of each dropped sharer's mask key (U2 - U3).

    Raises ShareError, which blames the answerer, where one is missing, repeated, malformed or not asked for.
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
