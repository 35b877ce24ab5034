"""Complaints: a device shows that a peer signed an envelope for it in which there are no shares.

Everybody can check a complaint. Each device has one key for each possible sender, all under the Merkle root that it
advertised. It reveals the key for the accused sender, and with that and the sender's advertised key everybody can try
to open the envelope. AES-GCM does not commit to a key, so without the tree the device could name a wrong key. The
revealed key opens this one envelope only: no other is sealed to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import pairwise

from archipel.errors import ConsistencyError, ShareError
from archipel.protocol.messages import Complaint, Complaints
from archipel.protocol.sealed import encode
from archipel.protocol.secagg import keys
from archipel.protocol.secagg.envelope import check_signature, open_shares
from archipel.protocol.secagg.session import Session


def check_complaint(complaint: Complaint, session: Session) -> None:
    """Returns where the complaint holds.

    Raises CertificateError where the accused did not sign the envelope, ShareError where the envelope opens, where the
    key is not the one that the complainer advertised for this sender, or where one of the two is not in the cohort.
    """
    accused, complainer = complaint.accused, complaint.complainer
    what = f"complaint of {complainer} about {accused}"
    if accused == complainer or accused not in session.peers or complainer not in session.peers:
        raise ShareError(f"{what}: expected two members of the cohort")
    sender, associated = session.peers[accused], session.associated(accused, complainer)
    check_signature(sender.device_key, complaint.signature, complaint.ciphertext, associated, accused)
    public = keys.public_key(complaint.key)
    # X25519 ignores five bits of a private key. With one accepted spelling, a complaint cannot be varied into others
    # that have another digest and are just as valid.
    if complaint.key != keys.clamp(complaint.key):
        raise ShareError(f"{what}: the key is not spelled as X25519 uses it")
    if not session.is_key_for(accused, complainer, public, complaint.path):
        raise ShareError(f"{what}: the key is not the one that {complainer} advertised for {accused}")
    shared = keys.agree(complaint.key, sender.cipher_key)
    key = keys.envelope_key(shared, session.salt, sender.cipher_key, public)
    try:
        open_shares(key, complaint.ciphertext, associated, accused)
    except ShareError:
        return
    raise ShareError(f"{what}: the envelope opens, and holds two shares")


def check_complaints(complaints: Complaints, session: Session) -> frozenset[str]:
    """The accused devices. Raises ConsistencyError unless they are sorted and distinct, else as `check_complaint`."""
    accused = [complaint.accused for complaint in complaints.complaints]
    if any(one >= after for one, after in pairwise(accused)):
        raise ConsistencyError(
            "complaints: accused devices must be sorted and distinct, so that a list has one spelling"
        )
    for complaint in complaints.complaints:
        check_complaint(complaint, session)
    return frozenset(accused)


def merge_complaints(lists: Iterable[Complaints]) -> Complaints:
    """One complaint about each accused device: one proves the fault, and the list stays as short as the cohort."""
    # The complainer with the smallest id, so that the result does not depend on the order in which complaints come.
    chosen: dict[str, Complaint] = {}
    for complaint in (complaint for complaints in lists for complaint in complaints.complaints):
        known = chosen.setdefault(complaint.accused, complaint)
        if complaint.complainer < known.complainer:
            chosen[complaint.accused] = complaint
    return Complaints(complaints=[chosen[accused] for accused in sorted(chosen)])


def complaints_digest(complaints: Complaints) -> str:
    """SHA-256 (hex) over the JSON of the list, which every survivor signs."""
    return hashlib.sha256(encode(complaints)).hexdigest()
