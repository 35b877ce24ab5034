"""A process full of devices, each in a thread of its own, that ends when it is told to or when its parent ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from typing import NoReturn

from archipel.server.processes.parent import end_with_parent

STOP_SECONDS = 3.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def follow_parent(parent: int) -> None:
    """End with process `parent`, and keep SIGTERM and SIGINT for `run_until_stopped`. Call it before threads start."""
    # `sigwait` instead of a handler: a handler that sets an event may interrupt the thread that holds the event's lock.
    # Threads inherit the mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    end_with_parent(parent)


def run_until_stopped(works: Iterable[Callable[[threading.Event], None]]) -> NoReturn:
    """Run each work in a thread. At SIGTERM or SIGINT set the event that all have, wait for them, and end."""
    stop = threading.Event()
    threads = [threading.Thread(target=work, args=(stop,)) for work in works]
    for thread in threads:
        thread.start()
    signal.sigwait(_SIGNALS)
    stop.set()
    deadline = time.monotonic() + STOP_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    # Without `_exit` Python would wait for threads inside a long computation, whose results nobody needs.
    os._exit(0)
