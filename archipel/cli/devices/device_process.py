"""The process of `archipel device run`: signals, systemd, exit codes, and lines of the log."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import click
import msgspec

from archipel.cli.input_output.tables import one_line
from archipel.cli.main import fail
from archipel.client import Event
from archipel.client.rounds.exchange import LATER
from archipel.errors import ArchipelError, CommandError, RefusedError, UnreachableError
from archipel.protocol.moments import moment
from archipel.readable import wait_readable

UNMENDABLE = 78
"""Exit code EX_CONFIG of sysexits.h: settings, identity or files are wrong, and starting again would not mend that."""
_QUIET = ("waiting", "paused")


@contextmanager
def fail_if_unmendable() -> Iterator[None]:
    """End the process with UNMENDABLE where the block raises an ArchipelError, and let temporary failures pass.

    systemd restarts the agent after exit code 1, and not after UNMENDABLE. A server that does not answer, or answers
    that it cannot do so now, may recover by itself.
    """
    try:
        yield
    except (UnreachableError, RefusedError) as error:
        if isinstance(error, UnreachableError) or error.status in {401, *LATER}:
            raise
        fail(f"{error}; the server does not take this device: ask its operator, or enrol anew", UNMENDABLE)
    except ArchipelError as error:
        fail(str(error), UNMENDABLE)


class Stop(threading.Event):
    """The event that ends the agent, which a signal handler can set.

    threading.Event takes a lock in `set`. A handler interrupts the main thread, which may hold that lock in `wait`, so
    the handler would wait for ever. This one has a flag, and a pipe that wakes the thread that waits (the self-pipe
    trick). `beat` is called by `is_set` and by `wait`, at least every `beat_seconds`, to report that the loop is alive.
    """

    def __init__(self, beat: Callable[[], None], beat_seconds: float) -> None:
        super().__init__()
        self._asked = False
        self._beat = beat
        self._beat_seconds = beat_seconds
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def set(self) -> None:
        self._asked = True
        # The pipe is full after many signals; then a wake-up is under way already.
        with suppress(BlockingIOError):
            os.write(self._write, b"\0")

    def is_set(self) -> bool:
        self._beat()
        return self._asked

    def wait(self, timeout: float | None = None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.is_set():
            left = self._beat_seconds if deadline is None else min(self._beat_seconds, deadline - time.monotonic())
            if left <= 0:
                break
            # Nobody reads the byte out: the event stays set, and so does every later wait end at once.
            wait_readable(self._read, left)
        return self._asked

    def on_signals(self) -> None:
        """Let SIGTERM and SIGINT set the event. A second signal ends the process at once.

        That loses nothing: what was sent is on the disk.
        """

        def handle(number: int, _: object) -> None:
            self.set()
            for ending in (signal.SIGTERM, signal.SIGINT):
                signal.signal(ending, signal.SIG_DFL)

        for ending in (signal.SIGTERM, signal.SIGINT):
            signal.signal(ending, handle)


class Supervisor:
    """Reports to systemd by sd_notify(3), over the socket that $NOTIFY_SOCKET names; without it, reports nothing."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        period = environment.get("WATCHDOG_USEC", "")
        # A child of the watched process inherits the variables; WATCHDOG_PID says who is meant.
        ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        watched = bool(self._address) and ours and period.isdecimal() and int(period) > 0
        # Half of the period, which is in microseconds, as sd_watchdog_enabled(3) recommends.
        self.beat_seconds = int(period) / 2e6 if watched else 3600.0
        self._watched = watched
        self._next = 0.0

    def ready(self) -> None:
        self._send("READY=1")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def status(self, text: str) -> None:
        self._send(f"STATUS={text}")

    def beat(self) -> None:
        """Tell the watchdog that the process is alive, at most every quarter of its period.

        Callers beat every `beat_seconds`, half of the period. With that as the least distance, a beat that comes a
        little early would be left out, and the next one would come too late.
        """
        if self._watched and time.monotonic() >= self._next:
            self._next = time.monotonic() + self.beat_seconds / 2
            self._send("WATCHDOG=1")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        # "@" stands for the zero byte of an abstract socket. The agent goes on where systemd does not listen any more.
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as end:
            end.sendto(text.encode(), self._address.replace("@", "\0", 1))


class Log:
    """Writes one line for each event. An agent that waits or is paused for one reason repeats its event: one line."""

    def __init__(self, as_json: bool, supervisor: Supervisor) -> None:
        self._as_json = as_json
        self._supervisor = supervisor
        self._last = ("", "")

    def __call__(self, event: Event) -> None:
        key = (event.name, event.round_id + str(event.detail.get("reason", "")))
        if event.name in _QUIET and key == self._last:
            return
        self._last = key
        counts = {"sent": event.bytes_sent, "received": event.bytes_received}
        self.line(event.name, event.detail, {"device": event.device_id, "round": event.round_id, **counts})

    def line(self, name: str, detail: Mapping[str, str | float], more: Mapping[str, str | int]) -> None:
        """Write a line: `detail` for everybody; of `more` people see the round only, and JSON has all."""
        now = time.time()
        shown = (
            f"{key} {value:.6g}" if isinstance(value, float) else f"{key} {value}" for key, value in detail.items()
        )
        # Details may hold a server's words.
        text = one_line("  ".join(shown))
        if self._as_json:
            click.echo(msgspec.json.encode({"time": now, "event": name, **more, "detail": detail}))
        else:
            place = f"  round {str(more['round'])[:8]}" if more.get("round") else ""
            click.echo(f"{moment(now)}  {name:<10}{place}  {text}".rstrip())
        self._supervisor.status(f"{name} {text}".strip())


def seconds(text: str) -> float:
    """The seconds of a duration such as 90s, 45m, 2h or 3d, at most ten years. Raises CommandError."""
    number, unit = text[:-1], text[-1:]
    scale = {"s": 1, "m": 60, "h": 3600, "d": 86400}.get(unit)
    try:
        value = float(number) * (scale or 0)
    except ValueError:
        value = 0.0
    if not 0 < value <= 3650 * 86400:
        raise CommandError(f"expected a time such as 90s, 45m, 2h or 3d, got {text[:40]!r}")
    return value
