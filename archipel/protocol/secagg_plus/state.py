"""What a device remembers of a secure round, so that a restart does not end its part in it.

A device writes this, sealed, before it sends what a step returned. So whatever it has sent is in here: after a restart
it sends the same again, and never masks another vector with these masks or answers another question. What it had
computed and not yet written was not sent either, and is computed anew.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from archipel.errors import MessageError
from archipel.protocol.messages import Digest, Key, RoundId
from archipel.protocol.secagg_plus.member import FULL_BYTES
from archipel.protocol.secagg_plus.messages import Invitation, Place, Question
from archipel.protocol.secagg_plus.shares import SHARE_BYTES

Secret = Annotated[bytes, Meta(max_length=32)]
Share = Annotated[bytes, Meta(min_length=SHARE_BYTES, max_length=SHARE_BYTES)]
LEFT = "nothing, the device left the round"


class State(msgspec.Struct, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Of one round.

    Attributes:
        round_id, plan: the round that it is for.
        next: the step that comes next, or why there is none.
        cipher_secret, mask_secret, seed: the secrets; empty once they are dropped.
        held: by dealer its shares that this device holds, of the mask key and of the seed.
        keys, member: the public keys and the member that it advertised.
        invitation, neighbours: the cohort, and the places that it drew.
        mask_keys, device_keys: of its partners, and of its neighbours, by place.
        question: the one that it has confirmed.
        done, given, said: the last step, the digest of what it was given, and what it returned; of a masked vector the
            digest alone, since whoever sends the vector keeps it.
        parts, heard: with ML-KEM the secret parts of the keys of masks, by the place of a partner that the device drew,
            and of one that drew it; empty once they are dropped.
    """

    round_id: RoundId
    plan: Digest
    next: str = "advertise"
    cipher_secret: Secret = b""
    mask_secret: Secret = b""
    seed: Secret = b""
    held: dict[Place, tuple[Share, Share]] = {}
    keys: Annotated[bytes, Meta(max_length=FULL_BYTES)] = b""
    member: bytes = b""
    invitation: Invitation | None = None
    neighbours: list[Place] = []
    mask_keys: dict[Place, Key] = {}
    device_keys: dict[Place, Key] = {}
    question: Question | None = None
    done: str = ""
    given: bytes = b""
    said: bytes = b""
    parts: dict[Place, Key] = {}
    heard: dict[Place, Key] = {}

    def __repr__(self) -> str:
        return f"<State of round {self.round_id}, next: {self.next}>"

    def forget(self) -> None:
        """Drops all secrets."""
        self.cipher_secret = b""
        self.held = {}
        self.forget_masks()

    def forget_masks(self) -> None:
        """Drops those without which no vector can be masked."""
        self.mask_secret = self.seed = b""
        self.parts, self.heard = {}, {}


_DECODER = msgspec.msgpack.Decoder(State)


def write_state(state: State) -> bytes:
    """The state as it is kept. It has secrets: seal it before it leaves the memory."""
    return msgspec.msgpack.encode(state)


def read_state(data: bytes) -> State:
    """The state that `write_state` made. Raises MessageError, which shows nothing of it."""
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise MessageError("state of a secure round: damaged, or of another version") from None
