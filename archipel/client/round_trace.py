"""Spans of this device's part in a round, for an address that its owner has set: made of the events of the round."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from archipel.tracing import Tracer, device_ids, round_ids

if TYPE_CHECKING:
    from archipel.client.events import Event, OnEvent

_BEGINS = ("assigned", "resumed")
_ENDS = ("committed", "dropped", "refused", "paused")


@dataclass
class _Open:
    round_id: str
    began: float
    step: float


class RoundTrace:
    """Listens to an agent's events, and hands them on.

    A round is one span, and what the device did in it are spans below: from the event before to the one that says that
    it is done. Their names are those of the events. Nothing else of an event is told.
    """

    def __init__(self, address: str, on_event: OnEvent | None) -> None:
        self._tracer = Tracer(address, "archipel-device")
        self._on_event = on_event
        self._open: _Open | None = None

    def __call__(self, event: Event) -> None:
        self._trace(event)
        if self._on_event is not None:
            self._on_event(event)

    def close(self) -> None:
        """Send what waits."""
        self._tracer.close()

    def _trace(self, event: Event) -> None:
        now = time.time()
        if event.name in _BEGINS:
            self._open = _Open(event.round_id, now, now)
            return
        current = self._open
        if current is None or event.round_id != current.round_id:
            return
        own = device_ids(current.round_id)
        if event.name not in _ENDS:
            self._tracer.record(event.name, current.step, now, parent=own)
            current.step = now
            return
        self._open = None
        self._tracer.record(
            "device round", current.began, now, parent=round_ids(current.round_id), own=own,
            attributes={"archipel.outcome": event.name}, error="" if event.name == "committed" else event.name,
        )  # fmt: skip
