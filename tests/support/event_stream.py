"""Reads a stream of server-sent events as a browser does, in a thread of its own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple


class Event(NamedTuple):
    name: str
    id: str
    data: str
    at: float
    """time.monotonic() when it had arrived."""


class EventStream:
    """The events of a response's parts. `close` is called when nobody reads any more."""

    def __init__(self, parts: Iterable[bytes]) -> None:
        self.comments = 0
        self._events: queue.Queue[Event | None] = queue.Queue()
        self._thread = threading.Thread(target=self._read, args=(parts,), daemon=True)
        self._thread.start()

    def next(self, timeout: float = 5.0) -> Event | None:
        """The next event; None at the end of the stream. Raises queue.Empty if there is none in so many seconds."""
        return self._events.get(timeout=timeout)

    def until(self, words: str, timeout: float = 5.0) -> Event:
        """The next event that has these words."""
        ends = time.monotonic() + timeout
        while True:
            event = self.next(max(0.01, ends - time.monotonic()))
            assert event is not None, f"the stream ended before {words!r}"
            if words in event.data:
                return event

    def ended(self, timeout: float = 5.0) -> list[str]:
        """Wait for the end; the names of the events before it."""
        names = []
        while (event := self.next(timeout)) is not None:
            names.append(event.name)
        return names

    def join(self) -> None:
        """Wait until nobody reads any more."""
        self._thread.join(5.0)
        assert not self._thread.is_alive()

    def _read(self, parts: Iterable[bytes]) -> None:
        buffer = ""
        # A connection that breaks is an end like any other.
        with suppress(Exception):
            for part in parts:
                buffer += part.decode()
                while "\n\n" in buffer:
                    block, buffer = buffer.split("\n\n", 1)
                    self._take(block)
        self._events.put(None)

    def _take(self, block: str) -> None:
        name, number, data = "message", "", []
        for line in block.split("\n"):
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "event":
                name = value
            elif field == "id":
                number = value
            elif field == "data":
                data.append(value)
            elif field == "":
                self.comments += 1
        if data:
            self._events.put(Event(name, number, "\n".join(data), time.monotonic()))
