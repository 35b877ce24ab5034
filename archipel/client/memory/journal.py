"""The journal: what the device does in each round, on disk before the device does it.

The agent records a step, and syncs it, before it sends the step's message. The secrets of a round over a complete graph
are in memory only, so such a round that was interrupted after its keys were sent is never begun again: it would use a
mask twice. What a round over neighbours needs to go on is beside its entry (kept.py). The masked bytes are on disk
before they are sent, and the device never sends other bytes for that round. They are sealed, like the device's new
state: in a plain round they are the update itself.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from archipel.client.memory import kept
from archipel.client.memory.entry import Entry, Result, Step
from archipel.client.memory.kept import Kept
from archipel.client.memory.plan_book import PlanBook
from archipel.client.memory.spending import Sums
from archipel.client.memory.stored import read_stored
from archipel.client.memory.vault import Vault
from archipel.durable import make_folder, sweep, write_durably
from archipel.errors import ClientError, PolicyError
from archipel.protocol.messages import RoundId, RoundPlan, over_neighbours
from archipel.protocol.sealed import encode
from archipel.protocol.vector import Vector

KEPT_ROUNDS = 256
_FORGOTTEN, _PLANS, _ROOTS = "forgotten", "plans", "root-plans"
_MAX_ENTRY_BYTES = 64 << 10
_MAX_FORGOTTEN_BYTES = 1 << 20
_MASKED, _STATE = ".masked", ".state"
_BESIDE = (_MASKED, _STATE, *kept.FILES)


class Forgotten(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sums over rounds whose entries were removed. `rounds` names the ones that were added last: a kill may have
    left their entries in place."""

    sums: Sums = Sums()
    rounds: list[RoundId] = []


class Journal:
    """One file per round in `folder`; while a round is open, its masked bytes and the new state lie beside the file."""

    def __init__(self, folder: Path, vault: Vault, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._vault = vault
        self._clock = clock
        self._plans = PlanBook(folder / _PLANS)
        self._roots = PlanBook(folder / _ROOTS)
        self._open: dict[str, Entry] | None = None
        """The entries that are not closed; None: not read yet. Every check-in asks for them."""
        make_folder(folder)
        sweep(folder)
        # `close` records the end before it removes these files, so a kill in between leaves some behind.
        for kind in _BESIDE:
            for path in folder.glob(f"*{kind}"):
                entry = self.get(path.stem)
                if entry is None or entry.step == "closed":
                    path.unlink()

    def begin(self, plan: RoundPlan, digest: str) -> OpenRound:
        """Begin a round, or begin it again after an interruption; `digest` is that of the plan.

        Raises ClientError if the device has sent keys for it, if it is closed, or if its plan is an old one.
        """
        before = self.get(plan.round_id)
        if before is not None and before.step != "assigned":
            raise ClientError(f"round {plan.round_id}: this device has been in it already (step {before.step!r})")
        why = self.why_old(plan)
        if why:
            raise ClientError(f"round {plan.round_id}: its plan is an old one: {why}")
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
            stated=plan.server_noise,
            # In an asynchronous task the vector depends on when it is masked, so it cannot be kept before.
            resumes=over_neighbours(plan.protocol) and plan.staleness_exponent is None,
        )
        self._write(entry)
        # The entry first: after a kill in between, `why_old` lets the round begin again. The other order would make the
        # device refuse a plan that it never carried out.
        self._plans.take(plan)
        return OpenRound(self, entry)

    def why_old(self, plan: RoundPlan) -> str:
        """Why the plan is one that the device took before; empty if it is new, or if its round may begin again."""
        before = self.get(plan.round_id)
        return "" if before is not None and before.step == "assigned" else self._plans.why_old(plan)

    def get(self, round_id: str) -> Entry | None:
        """The entry of a round, None if there is none. Raises ClientError if it is damaged."""
        return _read_entry(self._path(round_id))

    def entries(self) -> list[Entry]:
        """The entries on disk, the oldest round first."""
        return read_entries(self._folder)

    def count_begun_since(self, time: float, *, besides: str = "") -> int:
        """How many rounds began after `time` (Unix seconds) and were not refused, without the round `besides`.

        The journal knows the last KEPT_ROUNDS only.
        """
        return sum(
            entry.started > time and entry.result != "refused" and entry.round_id != besides for entry in self.entries()
        )

    def sums(self, *, besides: str = "") -> Sums:
        """The sums over all rounds, also those whose entries were removed, without the round `besides`."""
        forgotten = read_forgotten(self._folder)
        left_out = {*forgotten.rounds, besides}
        return forgotten.sums.plus(entry for entry in self.entries() if entry.round_id not in left_out)

    def unfinished(self) -> list[OpenRound]:
        """The rounds that are not closed; after a restart, those that were interrupted."""
        if self._open is None:
            self._open = {entry.round_id: entry for entry in self.entries() if entry.step != "closed"}
        return [OpenRound(self, entry) for entry in self._open.values()]

    def _write(self, entry: Entry) -> None:
        # None while it writes: if that fails half-way, the entries are read from the disk again.
        opened, self._open = self._open, None
        write_durably(self._path(entry.round_id), encode(entry))
        if opened is not None:
            opened.pop(entry.round_id, None)
            self._open = opened if entry.step == "closed" else {**opened, entry.round_id: entry}

    def _forget_old(self) -> None:
        closed = [entry for entry in self.entries() if entry.step == "closed"]
        # Two lists, each with KEPT_ROUNDS: a server that makes the device refuse round after round must not push the
        # rounds that it carried out from the journal.
        refused = [entry for entry in closed if entry.result == "refused"]
        begun = [entry for entry in closed if entry.result != "refused"]
        old = refused[:-KEPT_ROUNDS] + begun[:-KEPT_ROUNDS]
        if not old:
            return
        # The sums first, with the rounds' ids: after a kill in between, entries that are still there are not added
        # twice.
        before = read_forgotten(self._folder)
        sums = before.sums.plus(entry for entry in old if entry.round_id not in before.rounds)
        forgotten = Forgotten(sums=sums, rounds=[entry.round_id for entry in old])
        write_durably(self._folder / _FORGOTTEN, encode(forgotten))
        for entry in old:
            self._path(entry.round_id).unlink(missing_ok=True)

    def _path(self, round_id: str, kind: str = ".json") -> Path:
        return self._folder / f"{round_id}{kind}"


class OpenRound:
    """A round in the journal that is not closed yet. `entry` is as it is on disk."""

    def __init__(self, journal: Journal, entry: Entry) -> None:
        self._journal = journal
        self.entry = entry

    @property
    def counted(self) -> bool:
        """Whether the server has said that this device's update is in the sum; the round can still fail."""
        return self.entry.step in ("confirming", "unmasking")

    @property
    def keys_sent(self) -> bool:
        """Whether a message of the round may have left the device."""
        return self.entry.step != "assigned"

    def advance(self, step: Step, **changes: object) -> None:
        """Record that `step` begins, with these changes of the entry. Durable when it returns."""
        entry = msgspec.structs.replace(self.entry, step=step, changed=self._journal._clock(), **changes)
        self._journal._write(entry)
        self.entry = entry

    def take_origin(self, origin: RoundPlan) -> None:
        """Record the root's plan, verified, that this round is a part of. Durable when it returns.

        Raises PolicyError if the device has taken it before in another round, at whatever edge server.
        """
        book = self._journal._roots
        why = book.why_old(origin)
        if self.entry.origin == origin.round_id:
            # Begun again after a restart, which may have come before the book had it.
            if not why:
                book.take(origin)
            return
        if why:
            raise PolicyError(f"round {origin.round_id} of the root server: this device has been in it: {why}")
        self.advance("assigned", origin=origin.round_id)
        book.take(origin)

    def store_masked(self, masked: bytes, digest: str, between: Callable[[], object] = lambda: None) -> None:
        """Store the masked bytes, call `between`, record step "masked". Raises ClientError if there are others."""
        path = self._journal._path(self.entry.round_id, _MASKED)
        # Of a round that resumes, a kill may have left bytes that were never sent, which `kept` says.
        if (path.exists() and not self.entry.resumes) or self.entry.masked is not None:
            raise ClientError(f"round {self.entry.round_id}: masked bytes are stored already; they are never replaced")
        # The bytes first: an entry that names them must never be without them.
        self._journal._vault.write(path, masked)
        between()
        self.advance("masked", masked=digest)

    def masked(self) -> tuple[bytes, str] | None:
        """The masked bytes, which may be sent, and sent again, and their SHA-256; None if there are none."""
        if self.entry.step != "masked" or self.entry.masked is None:
            return None
        data = self.read_masked(self.entry.masked)
        return None if data is None else (data, self.entry.masked)

    def read_masked(self, digest: str) -> bytes | None:
        """The stored masked bytes, if they have this SHA-256."""
        try:
            data = self._journal._vault.read(self._journal._path(self.entry.round_id, _MASKED))
        except ClientError:
            # The bytes are lost, so the device drops out: it sends nothing more.
            return None
        return data if data and hashlib.sha256(data).hexdigest() == digest else None

    def store_state(self, state: bytes, name: str, cohort: int) -> None:
        """Store the device's new state until the round's result is known, then record step "confirming".

        `name` is the file of the state that the new one replaces if the round is committed; `cohort` is the number of
        devices in the sum.
        """
        # The state first: an entry with step "confirming" that names it must never be without it.
        self._write_state(state)
        self.advance("confirming", state=name if state else "", cohort=cohort)

    def keep(self, plan: bytes, vector: Vector, state: bytes, name: str) -> None:
        """Store what a round over neighbours needs after a restart, before keys are sent; `state` and `name` as of
        `store_state`."""
        self._write_state(state)
        if self.entry.resumes:
            self.kept.write(plan, vector)
        self.advance("assigned", state=name if state else "")

    @property
    def kept(self) -> Kept:
        """What the round keeps for a restart. Only of a round that resumes there is anything."""
        return Kept(self._journal._vault, lambda kind: self._journal._path(self.entry.round_id, kind))

    def _write_state(self, state: bytes) -> None:
        if state:
            self._journal._vault.write(self._journal._path(self.entry.round_id, _STATE), state)

    def state(self) -> bytes | None:
        """The state that `store_state` or `keep` stored; None if there was none. Raises ClientError if it is lost."""
        if not self.entry.state:
            return None
        path = self._journal._path(self.entry.round_id, _STATE)
        state = self._journal._vault.read(path)
        if state is None:
            raise ClientError(f"{path}: there is no such file")
        return state

    def close(self, result: Result, reason: str = "", **changes: object) -> None:
        """Record that the round is over for this device, and remove the files beside its entry."""
        self.advance("closed", result=result, reason=reason[:1000], **changes)
        for kind in _BESIDE:
            self._journal._path(self.entry.round_id, kind).unlink(missing_ok=True)
        self._journal._forget_old()


def read_entries(folder: Path) -> list[Entry]:
    """The entries in the journal's folder, the oldest round first. Raises ClientError if one is damaged."""
    entries = [_read_entry(path) for path in folder.glob("*.json")]
    return sorted((entry for entry in entries if entry is not None), key=lambda entry: entry.started)


def read_forgotten(folder: Path) -> Forgotten:
    """The sums over the rounds whose entries were removed. Raises ClientError if the file is damaged."""
    remedy = "remove it, and what old rounds cost is forgotten"
    path = folder / _FORGOTTEN
    return read_stored(path, _MAX_FORGOTTEN_BYTES, "sums of old rounds", Forgotten, remedy) or Forgotten()


def _read_entry(path: Path) -> Entry | None:
    return read_stored(path, _MAX_ENTRY_BYTES, "journal entry", Entry, "remove it, and its round is forgotten")
