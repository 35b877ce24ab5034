"""Ctrl-C in a training by several processes: it is noted, and all of them end after the same batch."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def noted_interrupts(note: Callable[[], None]) -> Iterator[None]:
    """A context in which the first SIGINT calls `note`, and a second one raises KeyboardInterrupt at once, as usual.

    One process that ended at once would leave the others waiting for it. In a thread other than the main one, which
    gets no signals, and where the caller handles SIGINT itself, the context changes nothing.

    Example:
        with noted_interrupts(lambda: setattr(trainer, "stop", True)):
            trainer.run()
    """
    usual = signal.default_int_handler
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not usual:
        yield
        return

    def first(*_: Any) -> None:
        signal.signal(signal.SIGINT, usual)
        note()

    signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
