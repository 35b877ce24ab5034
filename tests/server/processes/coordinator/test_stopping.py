"""The flag that signal handlers raise."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time

from archipel.server.processes.stopping import Stop


def test_waiting_ends_when_it_is_raised() -> None:
    stop = Stop()
    started = time.monotonic()
    assert stop.wait(0.01) is False
    assert time.monotonic() - started >= 0.01
    threading.Timer(0.05, stop.set).start()
    assert stop.wait(10) is True
    assert time.monotonic() - started < 5
    assert stop.is_set()
    assert stop.wait(10) is True


def test_it_can_be_waited_for_in_a_process_with_many_open_files() -> None:
    """`select` refuses file descriptors from 1,024 on."""
    stop = Stop()
    stop._reader = fcntl.fcntl(stop._reader, fcntl.F_DUPFD_CLOEXEC, 1500)
    assert stop._reader >= 1500
    assert stop.wait(0.01) is False
    stop.set()
    assert stop.wait(10) is True


def test_a_handler_that_interrupts_the_waiting_thread_cannot_block_it() -> None:
    # With threading.Event this hangs within seconds: the handler needs the lock that the interrupted thread holds.
    stop = Stop()
    before = signal.signal(signal.SIGALRM, lambda *_: stop.set())
    try:
        for round_number in range(500):
            stop = Stop()
            signal.setitimer(signal.ITIMER_REAL, 0.0001 + round_number * 1e-6)
            while not stop.is_set():
                stop.wait(0.00005)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_signals_raise_it_and_the_old_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    stop = Stop()
    with stop.on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(10)
    assert signal.getsignal(signal.SIGTERM) == before
