"""A flag that a thread can wait for and a signal handler can raise.

threading.Event cannot be used: a handler that interrupts the thread which holds the event's lock would wait for ever.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from archipel.readable import wait_readable


class Stop:
    """A flag that any thread or signal handler raises once. `wait` then returns at once."""

    def __init__(self) -> None:
        # The pipe is never read, so every later `wait` returns at once too.
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
        """Sleep for `seconds`, or until the flag is raised. Returns whether it is raised."""
        if not self._raised:
            wait_readable(self._reader, seconds)
        return self._raised

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Raise the flag on SIGTERM and SIGINT while the block lasts. Outside the main thread it does nothing, because
        Python allows signal handlers only there."""
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
