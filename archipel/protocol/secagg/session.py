"""One session of a secure round: its members with their keys, and what their envelopes and signatures are bound to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from archipel.protocol.secagg import keys
from archipel.protocol.secagg.envelope import associated_data
from archipel.protocol.secagg.key_tree import is_under


@dataclass(frozen=True)
class Peer:
    """A participant with its identity key and the public keys that it made for the round, 32 bytes each.

    `position` is its x in secret sharing, from 1.
    """

    device_id: str
    device_key: bytes
    cipher_key: bytes
    mask_key: bytes
    envelope_root: bytes
    position: int

    @property
    def place(self) -> int:
        """Its index in the sorted cohort, from 0. Every other member's envelope key for it has the same index."""
        return self.position - 1


@dataclass(frozen=True)
class Session:
    """What the members of one cohort agree on.

    `peers` is U1 by device id, `plan` and `cohort` are digests (hex), `leaves` is the plan's max_cohort, the number of
    envelope keys that each member has.
    """

    round_id: str
    plan: str
    cohort: str
    peers: Mapping[str, Peer]
    leaves: int

    @property
    def salt(self) -> bytes:
        return keys.round_salt(self.round_id, self.plan)

    def associated(self, sender: str, recipient: str) -> bytes:
        """The bytes that the envelope from `sender` to `recipient` is bound to."""
        return associated_data(self.round_id, self.cohort, sender, recipient)

    def is_key_for(self, sender: str, recipient: str, public: bytes, path: bytes) -> bool:
        """Whether `public` is the key that `recipient` advertised for envelopes from `sender`."""
        return is_under(self.peers[recipient].envelope_root, public, self.peers[sender].place, path, self.leaves)
