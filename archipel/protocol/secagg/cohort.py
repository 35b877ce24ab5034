"""U1, the devices that advertised keys for a round: who they are, and their position in secret sharing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping

from archipel.errors import ConsistencyError
from archipel.protocol.identity import VerifiedDevice, read_chain, verify_chain
from archipel.protocol.messages import Advertisement, Cohort, EnvelopeKey, Member, RoundPlan
from archipel.protocol.revocations import NOBODY, Revoked
from archipel.protocol.sealed import decode
from archipel.protocol.secagg.checks import check_advertisement
from archipel.protocol.secagg.key_tree import KeyTree
from archipel.protocol.secagg.session import Peer, Session


def verify_cohort(
    cohort: Cohort,
    own: VerifiedDevice,
    enrolment_key: bytes,
    round_id: str,
    plan_digest: str,
    revoked: Revoked = NOBODY,
) -> dict[str, Peer]:
    """Peers by device id, in sorted order, once every chain and every advertisement is verified.

    All members must be of the population and kind of `own`, and none may be `revoked`. No device, token, device key or
    round key may occur twice, so that one device cannot count as many.

    Raises CertificateError, MessageError or ConsistencyError.
    """
    tokens: set[bytes] = set()

    def verify(member: Member) -> tuple[str, bytes, Advertisement]:
        # The chain first: only then is `device_key` a key that the advertisement can be verified with.
        device = verify_chain(member.chain, enrolment_key, population=own.population)
        revoked.require_member(device)
        if device.kind != own.kind:
            raise ConsistencyError(f"cohort: {device.device_id} is a {device.kind}, this participant a {own.kind}")
        if device.token_key in tokens:
            raise ConsistencyError(f"cohort: {device.device_id} shares its enrolment token with another member")
        tokens.add(device.token_key)
        advertisement = check_advertisement(member.advertisement, device.device_key, round_id, plan_digest)
        return device.device_id, device.device_key, advertisement

    peers = _peers(cohort, verify)
    _require_distinct("device key", (peer.device_key for peer in peers.values()))
    return peers


def read_cohort(cohort: Cohort) -> dict[str, Peer]:
    """Peers by device id, in sorted order, of a cohort whose members the caller verified when they advertised."""

    def read(member: Member) -> tuple[str, bytes, Advertisement]:
        return *read_chain(member.chain), decode("advertisement", member.advertisement.body, Advertisement)

    return _peers(cohort, read)


def read_session(cohort: Cohort, plan: RoundPlan) -> Session:
    """The session of a cohort whose members the caller verified when they advertised."""
    return Session(
        round_id=plan.round_id, plan=advertised_plan(cohort), cohort=cohort_digest(cohort), peers=read_cohort(cohort),
        leaves=plan.max_cohort,
    )  # fmt: skip


def read_envelope_keys(cohort: Cohort, own: str, session: Session) -> dict[str, bytes]:
    """The key that each other member has for the envelope from `own`, by device id.

    Raises ConsistencyError unless there is one key of each member, under the root that this member advertised.
    """
    envelope_keys: dict[str, bytes] = {}
    for item in cohort.keys:
        if item.peer == own or item.peer not in session.peers or item.peer in envelope_keys:
            raise ConsistencyError(f"cohort: an envelope key of {item.peer}, expected one of each other member")
        if not session.is_key_for(own, item.peer, item.key, item.path):
            raise ConsistencyError(f"cohort: the envelope key of {item.peer} is not the one that it advertised")
        envelope_keys[item.peer] = item.key
    missing = sorted(set(session.peers) - {own} - set(envelope_keys))
    if missing:
        raise ConsistencyError(f"cohort: no envelope key of {missing[:3]}")
    return envelope_keys


def hand_out_keys(trees: Mapping[str, KeyTree], reader: str) -> list[EnvelopeKey]:
    """The keys that the other members of U1 (`trees`, by device id) have for the envelopes of `reader`."""
    # Every member has its key for `reader` at the same index of its tree, that of `reader` in the sorted cohort.
    place = sorted(trees).index(reader)
    return [
        EnvelopeKey(peer=peer, key=trees[peer].key(place), path=trees[peer].path(place))
        for peer in sorted(trees)
        if peer != reader
    ]


def cohort_digest(cohort: Cohort) -> str:
    """SHA-256 (hex) over the sorted device ids and advertisements. It names this one session of the round."""
    # Both parts of a row have a fixed length, so that no two cohorts give the same bytes.
    rows = sorted(
        read_chain(member.chain)[0] + hashlib.sha256(member.advertisement.body).hexdigest() for member in cohort.members
    )
    return hashlib.sha256(b"archipel/v1/cohort\0" + bytes.fromhex("".join(rows))).hexdigest()


def advertised_plan(cohort: Cohort) -> str:
    """The digest of the plan that all members advertised for. Raises ConsistencyError when they differ."""
    plans = {decode("advertisement", member.advertisement.body, Advertisement).plan for member in cohort.members}
    if len(plans) != 1:
        raise ConsistencyError(f"cohort: expected advertisements for one plan, got {len(plans)}")
    return plans.pop()


def _peers(cohort: Cohort, read: Callable[[Member], tuple[str, bytes, Advertisement]]) -> dict[str, Peer]:
    members = {}
    for member in cohort.members:
        name, device_key, advertisement = read(member)
        if name in members:
            raise ConsistencyError(f"cohort: {name} is in it twice")
        members[name] = (device_key, advertisement)
    # All keys of the round in one set: nobody's cipher key may be another's mask key either, which the server may
    # reconstruct.
    _require_distinct("round key", (key for _, ad in members.values() for key in (ad.cipher_key, ad.mask_key)))
    # Positions follow the sorted ids, so that every member and the server number the cohort alike.
    return {
        name: Peer(name, members[name][0], ad.cipher_key, ad.mask_key, ad.envelope_root, position)
        for position, name in enumerate(sorted(members), start=1)
        for ad in (members[name][1],)
    }


def _require_distinct(what: str, keys: Iterable[bytes]) -> None:
    seen: set[bytes] = set()
    for key in keys:
        if key in seen:
            raise ConsistencyError(f"cohort: {what} {key.hex()[:16]}... occurs twice")
        seen.add(key)
