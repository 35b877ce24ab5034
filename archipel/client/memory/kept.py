"""What a round over neighbours keeps beside its journal entry, sealed, so that it goes on after a restart.

The plan and the vector are written before keys are sent, the participant's state before anything that a step returned
is sent. The vector is erased when it is masked, the rest when the round is closed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from archipel.client.memory.vault import Vault
from archipel.durable import remove_durably
from archipel.errors import ClientError
from archipel.protocol.messages import Digest
from archipel.protocol.vector import Vector

_PLAN, _VECTOR, _SECRETS = FILES = (".plan", ".vector", ".secrets")


class Secrets(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`participant` is what `Participant.save` gave; `masked` the SHA-256 of the only bytes that may be sent as this
    device's update, None before there are any."""

    participant: bytes
    masked: Digest | None = None

    def __repr__(self) -> str:
        return f"<Secrets, {len(self.participant)} bytes>"


class Kept:
    """The files of one round; `place` gives the path for the end of a name. Reading one that is lost or damaged raises
    ClientError."""

    def __init__(self, vault: Vault, place: Callable[[str], Path]) -> None:
        self._vault = vault
        self._place = place

    def write(self, plan: bytes, vector: Vector) -> None:
        """Store the plan, as the server sealed it, and the vector to mask, uint32 [length]."""
        self._vault.write(self._place(_PLAN), plan)
        self._vault.write(self._place(_VECTOR), vector.astype("<u4").tobytes())

    def write_secrets(self, participant: bytes, masked: str | None) -> None:
        """Replace the participant's state. Durable when it returns."""
        self._vault.write(self._place(_SECRETS), msgspec.json.encode(Secrets(participant=participant, masked=masked)))

    def plan(self) -> bytes:
        return self._read(_PLAN)

    def vector(self, length: int) -> Vector:
        """The vector, uint32 [length]."""
        data = self._read(_VECTOR)
        if len(data) != 4 * length:
            raise ClientError(f"{self._place(_VECTOR)}: {len(data)} bytes, expected 4 for each of {length} entries")
        return np.frombuffer(data, "<u4").astype(np.uint32)

    def secrets(self) -> Secrets:
        try:
            return msgspec.json.decode(self._read(_SECRETS), type=Secrets)
        except msgspec.DecodeError:
            raise ClientError(f"{self._place(_SECRETS)}: damaged") from None

    def erase_vector(self) -> None:
        """Remove the vector, which is masked by now. Durable when it returns."""
        remove_durably(self._place(_VECTOR))

    def _read(self, kind: str) -> bytes:
        data = self._vault.read(self._place(kind))
        if data is None:
            raise ClientError(f"{self._place(kind)}: there is no such file")
        return data
