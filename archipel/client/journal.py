"""What the device did in each round, on disk before it did it.

A step is recorded, and fsynced, before its message is sent. The secrets of secure aggregation are in memory only, so a
round that was interrupted after its keys were sent is never taken up again: a mask would be used twice. The masked
bytes are on disk before they are first sent, and the same bytes are all that is ever sent for that round. They, and the
device's new state, are sealed: in a plain round they are the update itself.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from archipel.client.vault import Vault
from archipel.errors import ClientError, MessageError
from archipel.lite_runtime.durable import sweep, write_durably
from archipel.protocol.messages import Digest, Kind, RoundId, RoundPlan
from archipel.protocol.sealed import decode, encode

Step = Literal["assigned", "advertising", "sharing", "masked", "confirming", "unmasking", "closed"]
Result = Literal["", "took_part", "dropped", "refused"]

KEPT_ROUNDS = 256
_MAX_ENTRY_BYTES = 64 << 10
_MASKED, _STATE = _BESIDE = (".masked", ".state")


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One round. `step` is the last one begun; `sent` and `received` are bytes of bodies, times Unix seconds.

    `model` is the bundle's name. `cohort` is how many devices' updates are in the sum, 0 where the device was not told;
    `steps` are those of its training. `state` is the name of the file that the device's new state goes to if the round
    is committed. In a `buffered` round an update that was taken counts, whatever becomes of the round.
    """

    round_id: RoundId
    task_id: RoundId
    number: int
    plan: Digest
    bundle: Digest
    step: Step
    started: float
    changed: float
    masked: Digest | None = None
    state: str = ""
    result: Result = ""
    reason: str = ""
    examples: int = 0
    sent: int = 0
    received: int = 0
    buffered: bool = False
    kind: Kind = "training"
    privacy: Literal["secure", "plain"] = "secure"
    model: str = ""
    cohort: int = 0
    steps: int = 0


class Journal:
    """One file per round in `folder`; beside it, while it is open, the masked bytes and the device's new state."""

    def __init__(self, folder: Path, vault: Vault, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._vault = vault
        self._clock = clock
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder)
        for kind in _BESIDE:
            for path in folder.glob(f"*{kind}"):
                entry = self.get(path.stem)
                if entry is None or entry.step == "closed":
                    path.unlink()

    def begin(self, plan: RoundPlan, digest: str) -> OpenRound:
        """Begin a round, or begin it anew; `digest` is its plan's. Raises ClientError once keys were sent for it, or it
        was closed."""
        before = self.get(plan.round_id)
        if before is not None and before.step != "assigned":
            raise ClientError(f"round {plan.round_id}: this device has been in it already (step {before.step!r})")
        now = self._clock()
        entry = Entry(
            round_id=plan.round_id,
            task_id=plan.task_id,
            number=plan.number,
            plan=digest,
            bundle=plan.bundle,
            step="assigned",
            started=now,
            changed=now,
            buffered=plan.buffered,
            kind=plan.kind,
            privacy=plan.privacy,
        )
        self._write(entry)
        return OpenRound(self, entry)

    def get(self, round_id: str) -> Entry | None:
        """Raises ClientError when the entry is damaged."""
        path = self._path(round_id)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            if len(data) > _MAX_ENTRY_BYTES:
                raise MessageError(f"{len(data)} bytes, the limit is {_MAX_ENTRY_BYTES}")
            return decode("journal entry", data, Entry)
        except MessageError as error:
            raise ClientError(f"{path}: damaged ({error}); remove it, and its round is forgotten") from None

    def entries(self) -> list[Entry]:
        """All rounds, the oldest first."""
        found = [self.get(path.stem) for path in self._folder.glob("*.json")]
        return sorted((entry for entry in found if entry is not None), key=lambda entry: entry.started)

    def unfinished(self) -> list[OpenRound]:
        """Rounds that are not closed: after a restart, what was interrupted."""
        return [OpenRound(self, entry) for entry in self.entries() if entry.step != "closed"]

    def _write(self, entry: Entry) -> None:
        write_durably(self._path(entry.round_id), encode(entry))

    def _forget_old(self) -> None:
        closed = [entry for entry in self.entries() if entry.step == "closed"]
        for entry in closed[:-KEPT_ROUNDS]:
            self._path(entry.round_id).unlink(missing_ok=True)

    def _path(self, round_id: str, kind: str = ".json") -> Path:
        return self._folder / f"{round_id}{kind}"


class OpenRound:
    """A round in the journal that is not closed yet. `entry` is what is on disk."""

    def __init__(self, journal: Journal, entry: Entry) -> None:
        self._journal = journal
        self.entry = entry

    @property
    def counted(self) -> bool:
        """Whether this device was told that its update is in the sum; the round's result says if that holds."""
        return self.entry.step in ("confirming", "unmasking")

    @property
    def keys_sent(self) -> bool:
        """Whether a message of the round may have left the device."""
        return self.entry.step != "assigned"

    def advance(self, step: Step, **changes: object) -> None:
        """Record that `step` begins. Durable when it returns."""
        entry = msgspec.structs.replace(self.entry, step=step, changed=self._journal._clock(), **changes)
        self._journal._write(entry)
        self.entry = entry

    def store_masked(self, masked: bytes, digest: str) -> None:
        """Keep the masked bytes, then record step "masked". Raises ClientError if there are others already."""
        path = self._journal._path(self.entry.round_id, _MASKED)
        if path.exists() or self.entry.masked is not None:
            raise ClientError(f"round {self.entry.round_id}: masked bytes are stored already; they are never replaced")
        self._journal._vault.write(path, masked)
        self.advance("masked", masked=digest)

    def masked(self) -> tuple[bytes, str] | None:
        """Masked bytes that may have been sent and may be sent again, and their SHA-256; None if there are none."""
        if self.entry.step != "masked" or self.entry.masked is None:
            return None
        try:
            data = self._journal._vault.read(self._journal._path(self.entry.round_id, _MASKED))
        except ClientError:
            # Lost: the device drops out, which needs no more than silence.
            return None
        return (data, self.entry.masked) if data and hashlib.sha256(data).hexdigest() == self.entry.masked else None

    def store_state(self, state: bytes, name: str, cohort: int) -> None:
        """Keep the device's new state until the round's result is known, then record step "confirming"."""
        if state:
            self._journal._vault.write(self._journal._path(self.entry.round_id, _STATE), state)
        self.advance("confirming", state=name if state else "", cohort=cohort)

    def state(self) -> bytes | None:
        """What `store_state` kept; None if there was none. Raises ClientError if it was lost."""
        if not self.entry.state:
            return None
        path = self._journal._path(self.entry.round_id, _STATE)
        state = self._journal._vault.read(path)
        if state is None:
            raise ClientError(f"{path}: is gone")
        return state

    def close(self, result: Result, reason: str = "", **changes: object) -> None:
        """The round is over for this device; what lies beside its entry goes."""
        self.advance("closed", result=result, reason=reason[:1000], **changes)
        for kind in _BESIDE:
            self._journal._path(self.entry.round_id, kind).unlink(missing_ok=True)
        self._journal._forget_old()
