"""What a device's process has to do with the system around it: signals, systemd, exit codes, log lines."""

from __future__ import annotations

import os
import select
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

UNMENDABLE = 78
"""EX_CONFIG of sysexits.h: settings, identity or files are wrong, and starting again would not mend that."""
_QUIET = ("waiting", "paused")


@contextmanager
def unmendable() -> Iterator[None]:
    """Ends the process with UNMENDABLE for every error but those of a server that may come back."""
    try:
        yield
    except (UnreachableError, RefusedError) as error:
        if isinstance(error, UnreachableError) or error.status in {401, *LATER}:
            raise
        fail(f"{error}; the server does not take this device: ask its operator, or enrol anew", UNMENDABLE)
    except ArchipelError as error:
        fail(str(error), UNMENDABLE)


class Stop(threading.Event):
    """Set by signals: unlike its base it takes no lock, which a handler could find taken by the thread it interrupts.

    `beat` is called whenever somebody asks or waits, and while waiting every `beat_seconds`: the agent's loop is alive.
    """

    def __init__(self, beat: Callable[[], None], beat_seconds: float) -> None:
        super().__init__()
        self._asked = False
        self._beat = beat
        self._beat_seconds = beat_seconds
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def set(self) -> None:
        self._asked = True
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
            select.select([self._read], [], [], left)
        return self._asked

    def on_signals(self) -> None:
        """SIGTERM and SIGINT set it. A second one ends the process at once: what was sent is on disk."""

        def handle(number: int, _: object) -> None:
            self.set()
            for each in (signal.SIGTERM, signal.SIGINT):
                signal.signal(each, signal.SIG_DFL)

        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, handle)


class Supervisor:
    """systemd, if it started this process: sd_notify(3) over the socket that $NOTIFY_SOCKET names."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        period = environment.get("WATCHDOG_USEC", "")
        ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        watched = bool(self._address) and ours and period.isdecimal() and int(period) > 0
        # Half of it, as sd_watchdog_enabled(3) recommends.
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
        """Tell the watchdog, at most as often as it wants to be told."""
        if self._watched and time.monotonic() >= self._next:
            self._next = time.monotonic() + self.beat_seconds / 2
            self._send("WATCHDOG=1")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        # "@" stands for an abstract socket's zero byte. A supervisor that has gone is no reason to stop work.
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as end:
            end.sendto(text.encode(), self._address.replace("@", "\0", 1))


class Log:
    """One line for each event on standard output; of events that only repeat the last one, the first."""

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
        """`more` is for machines; of it people see the round."""
        now = time.time()
        shown = (
            f"{key} {value:.6g}" if isinstance(value, float) else f"{key} {value}" for key, value in detail.items()
        )
        text = one_line("  ".join(shown))
        if self._as_json:
            click.echo(msgspec.json.encode({"time": now, "event": name, **more, "detail": detail}))
        else:
            place = f"  round {str(more['round'])[:8]}" if more.get("round") else ""
            click.echo(f"{moment(now)}  {name:<10}{place}  {text}".rstrip())
        self._supervisor.status(f"{name} {text}".strip())


def seconds(text: str) -> float:
    """A duration such as 90s, 45m, 2h or 3d. Raises CommandError."""
    number, unit = text[:-1], text[-1:]
    scale = {"s": 1, "m": 60, "h": 3600, "d": 86400}.get(unit)
    try:
        value = float(number) * (scale or 0)
    except ValueError:
        value = 0.0
    if not 0 < value <= 3650 * 86400:
        raise CommandError(f"expected a time such as 90s, 45m, 2h or 3d, got {text[:40]!r}")
    return value
