"""The models that a device runs. FOLDER/models/NAME has the slots of one model, which alone say which version runs.

A model that the embedding program has asked for stays open until `close`. The slots of the others are open only during
a change, so that they take no memory, and other processes can own them in between.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from archipel.bundle import Bundle
from archipel.client.connection.identity import DeviceRecord
from archipel.client.device import Device
from archipel.client.rounds.work import state_name
from archipel.client.versions.comparing import Content
from archipel.errors import ArchipelError, ClientError, SlotError
from archipel.lite_runtime import DeviceState, Slots
from archipel.lite_runtime.slots.folder import Slot, SlotState, other, read_state
from archipel.protocol.messages import Offer

FOLDER = "models"
WITHDRAWN = "the server took it back"

Parameters = Mapping[str, np.ndarray] | None
"""A version's weights by name; None: the bundle's own."""


class RunningModels:
    """The slots of a device's models. Any thread may call `versions`, `model` and `renew`, the agent's the rest."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._folder = device.config.folder / FOLDER
        self._lock = threading.RLock()
        self._open: dict[str, Slots] = {}
        self._own: dict[Path, tuple[int, int]] = {}
        """The state files that running models have read, with the stamp of each at that time."""

    def close(self) -> None:
        """Close the models that `model` returned."""
        with self._lock:
            for slots in self._open.values():
                slots.close()
            self._open.clear()

    def folder(self, model: str) -> Path:
        """The folder of the model's slots."""
        return self._folder / model

    def state(self, model: str) -> SlotState:
        """The state of a model's slots. Raises SlotError, OSError."""
        return read_state(self._folder / model)

    def versions(self) -> dict[str, int]:
        """The number of the running version by model, without models whose slots are damaged, or all bad."""
        numbers: dict[str, int] = {}
        for path in sorted(self._folder.iterdir()) if self._folder.is_dir() else ():
            with suppress(SlotError, OSError):
                slot = current_slot(read_state(path))
                if slot is not None and slot.version:
                    numbers[path.name] = slot.version
        return numbers

    def model(self, name: str, record: DeviceRecord) -> Slots:
        """The slots of a model, which predict with its running version; the same object until `close`.

        Raises ClientError if no version was adopted yet, SlotError if another process owns the slots.
        """
        # Under the lock, so that two threads do not open the same slots twice.
        with self._lock:
            if name not in self._open:
                running = self.versions()
                if name not in running:
                    raise ClientError(
                        f"model {name!r}: this device runs no version of it; it runs: {', '.join(running) or 'none'}"
                    )
                self._open[name] = self._slots(name, record)
            return self._open[name]

    def renew(self) -> None:
        """Let open models read the personal tensors again that a round has changed since."""
        # A copy, because another thread may be loading a model, which adds an item.
        if all(_stamp(path) == before for path, before in list(self._own.items())):
            return
        with self._lock:
            for slots in self._open.values():
                with suppress(ArchipelError):  # the next round reports what is wrong with the file
                    slots.renew()

    # --- changes --------------------------------------------------------------------------------------------------

    def go_back(self, offer: Offer, record: DeviceRecord) -> bool:
        """Return to the version in the other slot, if it is the offered one and can be loaded; or return False."""
        with self._borrow(offer.model, record) as slots:
            state = slots.state
            if not state.active or not holds(state.slot(other(state.active)), offer):
                return False
            try:
                slots.rollback(WITHDRAWN)
            except SlotError:
                return False
            return True

    def install(self, offer: Offer, new: Content, weights: Parameters, record: DeviceRecord) -> None:
        """Install the version beside the running one, test it, and switch to it.

        Raises ArchipelError or OSError if self-test, loading or the disk fails; the running version then goes on.
        """
        with self._borrow(offer.model, record) as slots:
            running = current_slot(slots.state)
            if running is not None and slots.state.running == slots.state.active:
                # The running version has had no error so far. Once it is confirmed, the new version replaces the one
                # before it.
                slots.confirm()
            elif slots.state.active:
                with suppress(ArchipelError):
                    slots.runtime  # noqa: B018  (gives up the one that was never confirmed)
            slots.install(new.bundle.folder, weights, version=offer.version, weights=offer.weights or "")
            slots.switch()

    @contextmanager
    def _borrow(self, name: str, record: DeviceRecord) -> Iterator[Slots]:
        """The model's open slots, or slots that are open within the context only."""
        # The lock is held during the whole change: `model` must not open the same slots meanwhile.
        with self._lock:
            if name in self._open:
                yield self._open[name]
                return
            with self._slots(name, record) as slots:
                yield slots

    def _slots(self, name: str, record: DeviceRecord) -> Slots:
        config = self._device.config
        return Slots(
            self._folder / name,
            record.publisher_keys,
            threads=config.threads,
            delegates=config.delegates,
            memory_limit=config.max_peak_bytes,
            isolated=config.isolated,
            seconds=config.max_step_seconds if config.isolated else None,
            load=False,
            own=self._own_state,
            allow_development=config.allow_development,
        )

    def _own_state(self, bundle: Bundle) -> DeviceState:
        """The device's own state of the bundle's model: its personal tensors."""
        path = self._device.state_folder / state_name(bundle)
        # The stamp before the contents: a change in between is noticed as one, and only read twice.
        self._own[path] = _stamp(path)
        return self._device.state(path.name)


def current_slot(state: SlotState) -> Slot | None:
    """The slot whose version runs; None if no version does."""
    name = state.running
    return state.slot(name) if name else None


def holds(slot: Slot, offer: Offer) -> bool:
    """Whether the slot has the offered version, in good order."""
    return slot.status == "good" and _is_of(slot, offer)


def takes_back(offer: Offer, state: SlotState) -> bool:
    """Whether the server takes back the running version: it offers to all devices an older version, or the one in the
    other slot, which ran before."""
    running = current_slot(state)
    # The offer of a rollout is for some devices only, and takes nothing back.
    if offer.rollout is not None or running is None:
        return False
    return offer.version < running.version or any(holds(slot, offer) for slot in (state.a, state.b))


def why_given_up(state: SlotState, offer: Offer) -> str:
    """Why the slots gave up the offered version after it was adopted; empty if they did not."""
    for slot in (state.a, state.b):
        if _is_of(slot, offer):
            # A version that the server took back has not failed on this device.
            if slot.status == "bad" and slot.reason != WITHDRAWN:
                return slot.reason or "it failed while it ran"
            if slot.status == "trying" and not slot.attempts:
                return "it was started several times and never confirmed"
    return ""


def _is_of(slot: Slot, offer: Offer) -> bool:
    return (slot.version, slot.digest, slot.weights) == (offer.version, offer.bundle, offer.weights or "")


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0, 0
    return status.st_mtime_ns, status.st_ino
