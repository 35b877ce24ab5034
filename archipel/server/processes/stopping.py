"""A flag to wait for that a signal handler may raise.

threading.Event is not one: its lock may be held by the very thread that the handler interrupts.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Stop:
    """Raised once, by any thread or signal handler; `wait` wakes up at once."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._raised = False

    def __del__(self) -> None:
        os.close(self._reader)
        os.close(self._writer)

    def set(self) -> None:
        self._raised = True
        # A full pipe wakes the waiting thread just as well.
        with suppress(BlockingIOError):
            os.write(self._writer, b"1")

    def is_set(self) -> bool:
        return self._raised

    def wait(self, seconds: float) -> bool:
        """Sleep for `seconds` or until it is raised; returns whether it is."""
        if not self._raised:
            select.select([self._reader], [], [], seconds)
        return self._raised

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Raise it on SIGTERM and SIGINT. Python allows that in the main thread alone; elsewhere it does nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, lambda *_: self.set()) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
