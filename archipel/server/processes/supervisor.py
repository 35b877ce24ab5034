"""Runs gunicorn and one coordinator as child processes: starts, watches, restarts and stops them together."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import BinaryIO

from archipel.errors import ServerError
from archipel.protocol.backoff import Backoff
from archipel.readable import wait_readable
from archipel.server.data_folder import check_private_key, keep_public_key
from archipel.server.processes import children
from archipel.server.processes.open_files import allow_connections
from archipel.server.processes.stopping import Stop
from archipel.server.processes.tls import WebTls
from archipel.server.settings import MIN_FREE_BYTES, Settings
from archipel.server.storage.log_files import bound
from archipel.server.telemetry.log_lines import single_line

START_SECONDS = 30.0
KILL_SECONDS = 5.0
"""A child that goes on for so long after `stop_seconds` is killed."""
RESTARTS = Backoff(0.5, longest=10.0)
WATCH_SECONDS = 0.2
STEADY_SECONDS = 60.0
"""A child that lived for so long is restarted as quickly as the first time."""


def _print(line: str) -> None:
    print(line, flush=True)


def supervise(settings: Settings, *, announce: Callable[[str], None] = _print, stop: Stop | None = None) -> None:
    """Serve until SIGTERM, SIGINT or `stop`, and end all child processes before returning.

    Children that die are restarted, after 0.5 s at first and at most 10 s. Each restart is a line in DATA/server.log
    and on standard error. The children's output goes to DATA/server.log too.

    Arguments:
        settings: The server's settings.
        announce: Called with one line, the server's address, once it answers requests.
        stop: Ends the server when it is set.

    Raises:
        ServerError, TlsError: Something cannot start; the message is one line.

    Example:
        supervise(load_settings("server"))  # until SIGTERM or Ctrl-C
    """
    stop = stop or Stop()
    _check_space(settings)
    allow_connections(settings)
    check_private_key(settings)
    keep_public_key(settings)
    if settings.tls_certificate:
        WebTls(settings)
    with ExitStack() as stack:
        stack.enter_context(stop.on_signals())
        listener, log = stack.enter_context(_listener(settings)), stack.enter_context(_log_file(settings))
        stack.enter_context(_measured(settings))
        drain = stack.enter_context(_Drain())
        # That of an edge server has its uplink beside it.
        package = "server.processes" if settings.upstream is None else "edge"
        module = f"archipel.{package}.coordinator_process"
        coordinator = _Child("coordinator", [sys.executable, "-m", module], drain.reader)
        gunicorn = [sys.executable, "-m", "gunicorn", "-c", "python:archipel.server.processes.web"]
        web = _Child("web", gunicorn, drain.reader)
        every = [coordinator, web]
        try:
            begun = log.tell()
            # The coordinator first: it migrates the database, and web processes refuse an older schema.
            coordinator.start(settings, listener, log)
            if _wait(coordinator, coordinator.is_ready, settings, begun, stop):
                web.start(settings, listener, log)
            if _wait(web, web.is_ready, settings, begun, stop):
                announce(f"archipel server on {_address(settings, listener)}")

                def look_after() -> None:
                    bound(log, settings.process_log, most=settings.log_bytes, kept=settings.logs_kept)
                    for child in every:
                        child.restart_if_dead(settings, listener, log)

                while not stop.wait(WATCH_SECONDS):
                    look_after()
                drain.begin()
                # Whoever asks /readyz takes this server out of its list meanwhile.
                ends = time.monotonic() + settings.drain_seconds
                while time.monotonic() < ends:
                    time.sleep(min(WATCH_SECONDS, settings.drain_seconds))
                    look_after()
        finally:
            # All are asked before any is waited for, so they stop at the same time and share one deadline.
            for child in every:
                child.ask_to_stop()
            deadline = time.monotonic() + settings.stop_seconds + KILL_SECONDS
            for child in every:
                child.wait_or_kill(settings, deadline, log)


class _Drain:
    """A pipe that tells all children at once, and those that are started later, that the server is about to stop."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()

    def begin(self) -> None:
        """Close the only writing end."""
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1

    def __enter__(self) -> _Drain:
        return self

    def __exit__(self, *_: object) -> None:
        self.begin()
        os.close(self.reader)


@dataclass
class _Child:
    """One child process, and when it is started again.

    `ready` is the reading end of the pipe through which it says that it is up, `drain` that of _Drain. `deaths` counts,
    in a row, those that came soon after a start; they make the next restart wait longer.
    """

    name: str
    command: list[str]
    drain: int
    process: subprocess.Popen[bytes] | None = None
    ready: int = -1
    started: float = 0.0
    deaths: int = 0
    restart_at: float | None = None

    def start(self, settings: Settings, listener: socket.socket, log: BinaryIO) -> None:
        self._close_ready()
        self.ready, writer = os.pipe()
        environment = children.child_environment(settings)
        environment |= {children.LISTEN_FD: str(listener.fileno()), children.READY_FD: str(writer)}
        environment |= {children.DRAIN_FD: str(self.drain)}
        try:
            self.process = subprocess.Popen(
                self.command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # The listener stays open here: a restarted web process answers the connections that came meanwhile.
                pass_fds=(listener.fileno(), writer, self.drain),
                # A group of its own: Ctrl-C reaches only the supervisor, which then stops the children.
                process_group=0,
                # Nobody else may read the database, logs and files.
                umask=0o077,
            )
        except OSError as error:
            raise ServerError(f"the {self.name} process cannot be started ({error.strerror})") from None
        finally:
            # With the last writing end in the child, the pipe ends when the child does.
            os.close(writer)
        self.started = time.monotonic()
        self.restart_at = None

    def is_ready(self) -> bool:
        """Whether the child has written its byte. Does not wait."""
        return wait_readable(self.ready, 0) and os.read(self.ready, 1) == b"1"

    def exited(self) -> int | None:
        return None if self.process is None else self.process.poll()

    def restart_if_dead(self, settings: Settings, listener: socket.socket, log: BinaryIO) -> None:
        code = self.exited()
        if code is None:
            return
        now = time.monotonic()
        if self.restart_at is None:
            if now - self.started > STEADY_SECONDS:
                self.deaths = 0
            self.deaths += 1
            delay = RESTARTS.after(self.deaths)
            self.restart_at = now + delay
            names = {each.value: each.name for each in signal.Signals}
            how = f"was killed by {names.get(-code, f'signal {-code}')}" if code < 0 else f"ended with {code}"
            _tell(settings, log, f"the {self.name} process {how}; starting it again in {delay:g} s")
        elif now >= self.restart_at:
            self.start(settings, listener, log)

    def ask_to_stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()

    def wait_or_kill(self, settings: Settings, deadline: float, log: BinaryIO) -> None:
        self._close_ready()
        if self.process is None:
            return
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _tell(settings, log, f"the {self.name} process did not stop in time; killed")
            # gunicorn's workers too: the child leads a process group.
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _close_ready(self) -> None:
        if self.ready >= 0:
            os.close(self.ready)
            self.ready = -1


def _tell(settings: Settings, log: BinaryIO, line: str) -> None:
    """Write a line to the log and to standard error."""
    # A full disk or a closed terminal must not end the server.
    with suppress(OSError):
        log.write(single_line(settings.log_format, "archipel.supervisor", line).encode() + b"\n")
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def _wait(child: _Child, is_up: Callable[[], bool], settings: Settings, begun: int, stop: Stop) -> bool:
    """Wait until the child is up, and return True; False if `stop` is set first. Raises ServerError if it fails."""
    deadline = time.monotonic() + START_SECONDS
    while not stop.wait(0.02):
        if is_up():
            return True
        if child.exited() is not None:
            raise ServerError(_last_words(settings, child, begun))
        if time.monotonic() > deadline:
            raise ServerError(
                f"the {child.name} process is not up after {START_SECONDS:.0f} s; {settings.process_log} may say why"
            )
    return False


def _last_words(settings: Settings, child: _Child, begun: int) -> str:
    # A coordinator that cannot start prints one line that explains it; gunicorn's last line may be of a traceback.
    with open(settings.process_log, "rb") as file:
        file.seek(begun)
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    if child.name == "coordinator" and lines:
        return lines[-1]
    return f"the {child.name} process ended while starting; see {settings.process_log}"


def _address(settings: Settings, listener: socket.socket) -> str:
    # "All interfaces" is no address to connect to.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(settings.host, settings.host)
    scheme = "https" if settings.tls_certificate else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def _check_space(settings: Settings) -> None:
    try:
        free = shutil.disk_usage(settings.folder).free
    except OSError as error:
        raise ServerError(f"{settings.folder}: cannot be read ({error.strerror})") from None
    if free < MIN_FREE_BYTES:
        raise ServerError(
            f"{settings.folder}: the disk is full ({free >> 10} KiB free, at least {MIN_FREE_BYTES >> 20} MiB needed)"
        )


@contextmanager
def _listener(settings: Settings) -> Iterator[socket.socket]:
    where = f"{settings.host} port {settings.port}"
    try:
        family, *_ = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ServerError(f"{where}: in use by another program; choose another with --port") from None
        raise ServerError(f"{where}: cannot listen there ({error.strerror or error})") from None
    with listener:
        # Accepted connections inherit this timeout. Without it, a device that loses its network in the middle of a
        # request would keep a thread for ever.
        seconds, rest = divmod(settings.stall_seconds, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), int(rest * 1e6)))
        yield listener


@contextmanager
def _measured(settings: Settings) -> Iterator[None]:
    """Give the children an empty folder for what they measure, if they are to measure anything."""
    if not settings.metrics_port:
        yield
        return
    from archipel.server.telemetry import shared  # here, because most servers measure nothing

    shared.begin(settings)
    try:
        yield
    finally:
        shared.end(settings)


@contextmanager
def _log_file(settings: Settings) -> Iterator[BinaryIO]:
    try:
        log = open(settings.process_log, "ab", buffering=0, opener=_private)  # noqa: SIM115 - closed below
    except OSError as error:
        raise ServerError(f"{settings.process_log}: cannot be written ({error.strerror})") from None
    with log:
        yield log


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
