"""Two model slots on disk and the file that says which is active; every change survives being killed at any point.

FOLDER/lock          held by the process that owns the folder
FOLDER/state.json    SlotState
FOLDER/a, FOLDER/b   slot folders: `bundle/` and, where its parameters are others, `learned.safetensors`
"""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated, Literal

import msgspec
import numpy as np

from archipel.bundle import Bundle, open_bundle, unpack, write_weights
from archipel.bundle.manifest import MANIFEST_FILE, SIGNATURE_FILE
from archipel.durable import (
    make_folder,
    open_locked,
    replace_folder,
    sweep,
    sync_tree,
    temporary_folder,
    write_durably,
)
from archipel.errors import LockedError, SlotError
from archipel.lite_runtime.learned import BUNDLE_FOLDER, LEARNED_FILE

FORMAT = 1
STATE_FILE = "state.json"
MAX_STATE_BYTES = 64 << 10
MAX_ATTEMPTS = 1000
_MAX_REASON = 1000

SlotName = Literal["a", "b"]
Status = Literal["empty", "staged", "trying", "good", "bad"]


class Slot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The state file's entry of one slot.

    `status` is "staged" (installed, never active), "trying" (active, not confirmed yet), "good" (active, or the model
    to return to), or "bad" (it failed or was replaced, for `reason`). `attempts` is how often a staged or trying slot
    may still be loaded. `install` sets `version` and `weights` (hex SHA-256).
    """

    status: Status = "empty"
    name: Annotated[str, msgspec.Meta(max_length=256)] = ""
    digest: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$")] = ""
    attempts: Annotated[int, msgspec.Meta(ge=0, le=MAX_ATTEMPTS)] = 0
    reason: Annotated[str, msgspec.Meta(max_length=_MAX_REASON)] = ""
    version: Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)] = 0
    weights: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$")] = ""


class SlotState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of the state file. `active` is empty before the first switch."""

    format: int
    active: Literal["", "a", "b"] = ""
    a: Slot = Slot()
    b: Slot = Slot()

    def slot(self, name: SlotName) -> Slot:
        return self.a if name == "a" else self.b

    @property
    def running(self) -> Literal["", "a", "b"]:
        """The slot whose model answers requests now, or after the next start; "" if there is none."""
        if not self.active:
            return ""
        # An active slot without attempts is on trial and used up: the next start goes back to the good one.
        slot, rest = self.slot(self.active), self.slot(other(self.active))
        if slot.status == "good" or slot.attempts:
            return self.active
        return other(self.active) if rest.status == "good" else ""


_DECODER = msgspec.json.Decoder(SlotState)


def other(name: SlotName) -> SlotName:
    return "b" if name == "a" else "a"


class SlotFolder:
    """Owns a folder of slots until it is closed. Not for several threads at once."""

    def __init__(self, folder: Path | str) -> None:
        """Make the folder if it is not there. Raises SlotError if another process owns it or its state is damaged."""
        self.folder = Path(folder)
        self._unlock = weakref.finalize(self, os.close, _lock(self.folder))
        try:
            self.state = read_state(self.folder)
            self._clear_up()
        except OSError as error:
            self.close()
            raise SlotError(f"{self.folder}: cannot be used ({error.strerror})") from None
        except SlotError:
            self.close()
            raise

    def close(self) -> None:
        self._unlock()

    def __enter__(self) -> SlotFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def check_open(self) -> None:
        """Raises SlotError after `close`: another process may own the folder by then."""
        if not self._unlock.alive:
            raise SlotError(f"{self.folder}: these slots are closed; open the folder again")

    def path(self, name: SlotName) -> Path:
        return self.folder / name

    def install(
        self,
        source: Path | str,
        trusted_keys: Sequence[bytes],
        attempts: int,
        learned: Callable[[Bundle], Mapping[str, np.ndarray]],
        *,
        version: int = 0,
        weights: str = "",
        allow_development: bool = False,
    ) -> SlotName:
        """Verify the bundle (folder or file), copy it to the slot that is not in use and mark that one "staged".

        `learned` returns the tensors for LEARNED_FILE, and raises for a bundle that this device cannot run. Raises a
        BundleError or SlotError; nothing changes before the copy is complete and verified.
        """
        self.check_open()
        name = self._free_slot()
        try:
            with temporary_folder(self.path(name), 0o700) as staging:
                copy = staging / BUNDLE_FOLDER
                if Path(source).is_dir():
                    _copy_bundle(open_bundle(source, trusted_keys, allow_development=allow_development), copy)
                else:
                    unpack(source, copy)
                # Verified after copying: somebody may have changed the source since it was opened.
                bundle = open_bundle(copy, trusted_keys, allow_development=allow_development)
                tensors = learned(bundle)
                if tensors:
                    write_durably(staging / LEARNED_FILE, write_weights(tensors))
                sync_tree(staging)
                # Three steps: empty the entry, replace the folder, fill the entry. A process killed between them leaves
                # an "empty" entry, whose folder the next owner removes; no entry describes another slot's files.
                self.update(name, Slot())
                replace_folder(staging, self.path(name))
        except OSError as error:
            raise SlotError(f"{self.folder}: cannot install {source} ({error.strerror}); free some space") from None
        staged = Slot(
            status="staged",
            name=bundle.manifest.name,
            digest=bundle.digest,
            attempts=attempts,
            version=version,
            weights=weights,
        )
        self.update(name, staged)
        return name

    def update(self, name: SlotName, slot: Slot, *, active: SlotName | None = None, rest: Slot | None = None) -> None:
        """Write the slot's entry, that of the other slot (`rest`) and the active slot, all at once and durably."""
        # A process that closed the folder would overwrite the entries of its next owner.
        self.check_open()
        changes: dict[str, object] = {name: slot}
        if rest is not None:
            changes[other(name)] = rest
        if active is not None:
            changes["active"] = active
        state = msgspec.structs.replace(self.state, **changes)
        try:
            write_durably(self.folder / STATE_FILE, msgspec.json.encode(state))
        except OSError as error:
            raise SlotError(f"{self.folder}: the state cannot be written ({error.strerror}); nothing changed") from None
        # Only now: after an error the state in memory and the one on disk are still the same.
        self.state = state

    def _free_slot(self) -> SlotName:
        """The slot that a new bundle may overwrite."""
        state = self.state
        if state.active:
            free = other(state.active)
            # Overwriting the good model would leave nothing to return to if the trial fails. A bad or empty one is of
            # no use.
            if state.slot(state.active).status == "trying" and state.slot(free).status == "good":
                raise SlotError(
                    f"{self.folder}: slot {state.active} is still being tried and {free} is the one to return to; "
                    "confirm or roll back first"
                )
            return free
        # Before the first switch the newer bundle takes the place of one that nobody has switched to.
        return "b" if state.b.status == "staged" else "a"

    def _clear_up(self) -> None:
        """Remove what a killed process left behind. The lock is held, so nobody else is writing here."""
        sweep(self.folder)
        names: tuple[SlotName, ...] = ("a", "b")
        for name in names:
            if self.state.slot(name).status == "empty" and self.path(name).exists():
                shutil.rmtree(self.path(name))
            elif self.path(name).is_dir():
                sweep(self.path(name))


def mark_bad(slot: Slot, reason: str) -> Slot:
    """The entry of a slot that failed: not loaded again, `reason` on one line."""
    return msgspec.structs.replace(slot, status="bad", attempts=0, reason=" ".join(reason.split())[:_MAX_REASON])


def _lock(folder: Path) -> int:
    try:
        make_folder(folder, 0o700)
        return open_locked(folder / "lock")
    except LockedError:
        raise SlotError(f"{folder}: another process, or another Slots of this one, owns it; close that first") from None
    except OSError as error:
        raise SlotError(f"{folder}: cannot be used ({error.strerror})") from None


def running_slot(folder: Path | str) -> Path:
    """The folder of the model that these slots run, for `load`; another process may own the slots.

    Arguments:
        folder: the folder that was given to `Slots`.

    Returns the slot's folder. Its bundle stays until another model has become active and a further one is installed.

    Raises SlotError if no slot is active, or the state file is damaged.

    Example:
        with Slots("slots", trusted_keys) as slots:
            slots.install("digits.bundle")
            slots.switch()
        runtime = load(running_slot("slots"), trusted_keys)
    """
    running = read_state(Path(folder)).running
    if not running:
        raise SlotError(f"{folder}: no slot is active; install a bundle, then switch")
    return Path(folder) / running


def read_state(folder: Path) -> SlotState:
    """The contents of the state file of these slots. Takes no lock: every write replaces the file as a whole.

    Raises SlotError for a damaged file.
    """
    path = folder / STATE_FILE
    try:
        with open(path, "rb") as file:
            # One byte more than allowed tells a file that is too large, without reading all of it.
            data = file.read(MAX_STATE_BYTES + 1)
    except FileNotFoundError:
        return SlotState(format=FORMAT)
    hint = "restore it, or remove the folder and install anew"
    if len(data) > MAX_STATE_BYTES:
        raise SlotError(f"{path}: more than {MAX_STATE_BYTES} bytes; {hint}")
    try:
        state = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SlotError(f"{path}: damaged ({error}); {hint}") from None
    if state.format != FORMAT:
        raise SlotError(f"{path}: format {state.format}, this installation reads format {FORMAT}; update archipel")
    # The types admit combinations that no step writes, such as an active slot that is bad. They mean a damaged file.
    allowed: tuple[Status, ...] = ("trying", "good")
    names: tuple[SlotName, ...] = ("a", "b")
    for name in names:
        slot = state.slot(name)
        if name == state.active and slot.status not in allowed:
            raise SlotError(f"{path}: slot {name} is active but {slot.status!r}; {hint}")
        if name != state.active and slot.status == "trying":
            raise SlotError(f"{path}: slot {name} is being tried but not active; {hint}")
        if (slot.status == "empty") != (slot.digest == ""):
            raise SlotError(f"{path}: slot {name} is {slot.status!r} and its digest is {slot.digest!r}; {hint}")
    return state


def _copy_bundle(bundle: Bundle, target: Path) -> None:
    target.mkdir()
    # Only the signed files: anything else in the source folder stays there.
    for name in (MANIFEST_FILE, SIGNATURE_FILE, *sorted(bundle.manifest.files)):
        with open(bundle.folder / name, "rb") as source, open(target / name, "xb") as copy:
            shutil.copyfileobj(source, copy)
