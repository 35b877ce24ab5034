"""The other processes of a local federation: one server and several hosts of devices. None outlives this one."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec
import psutil

from archipel.cli.start.local.events import HostEvent
from archipel.errors import CommandError

HOST = (sys.executable, "-m", "archipel.cli.start.local.host")
START_SECONDS = 60.0
STOP_SECONDS = 8.0
READER_SECONDS = 2.0


class Processes:
    """Starts child processes, each the leader of its own process group, and ends them all in `close`.

    Their logs are in `folder`. `events` has the events of all hosts; `peak_memory` is in bytes, of all processes
    together.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._children: list[subprocess.Popen[bytes]] = []
        self.events: queue.Queue[HostEvent] = queue.Queue()
        self._readers: list[threading.Thread] = []
        self.peak_memory = 0
        self._done = threading.Event()
        self._meter = threading.Thread(target=self._measure_memory, daemon=True)
        self._meter.start()

    @property
    def count(self) -> int:
        """How many processes run now, this one and all below it."""
        return 1 + len(psutil.Process().children(recursive=True))

    def start_server(self, data_folder: Path, port: int = 0) -> str:
        """Start the server on this port, 0: a free one, and return its address.

        Raises CommandError with the last line of its log.
        """
        module = "archipel.cli.start.local.server"
        command = [sys.executable, "-m", module, str(data_folder), str(os.getpid()), str(port)]
        log = self._folder / f"{data_folder.absolute().parent.name}-errors.log"
        with open(log, "wb") as errors:
            child = self._start(command, errors)
        address: queue.Queue[str] = queue.Queue()

        def read() -> None:
            stream = _stdout(child)
            for line in stream:
                text = line.decode(errors="replace").strip()
                if "http://" in text:
                    address.put(text[text.index("http://") :])

        self._read_in_thread(read)
        # Short waits, so that a server that has ended is noticed at once.
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            try:
                return address.get(timeout=0.1)
            except queue.Empty:
                if child.poll() is not None:
                    raise CommandError(f"the server did not start: {_last_line(log)}") from None
        raise CommandError(f"the server did not start within {START_SECONDS:.0f} s: {_last_line(log)}")

    def start_hosts(self, configs: Sequence[msgspec.Struct], command: Sequence[str] = HOST) -> None:
        """Start one host process for each configuration, which gets its file; their events arrive in `events`."""
        for index, config in enumerate(configs):
            path = self._folder / f"host-{index}.json"
            path.write_bytes(msgspec.json.encode(config))
            with open(self._folder / f"host-{index}.log", "wb") as errors:
                child = self._start([*command, str(path)], errors)

            # As a default the child is this one; the name alone would mean the last child by the time it is read.
            def read(child: subprocess.Popen[bytes] = child) -> None:
                for line in _stdout(child):
                    self.events.put(msgspec.json.decode(line, type=HostEvent))

            self._read_in_thread(read)

    def check(self) -> None:
        """Raise CommandError if a process has ended that should run."""
        for child in self._children:
            if child.poll() is not None:
                name = " ".join(str(part) for part in child.args[2:5]) if isinstance(child.args, list) else "?"
                logs = sorted(self._folder.glob("*.log"))
                words = next((text for log in logs if (text := _last_line(log))), "no message")
                raise CommandError(f"a process of the federation ended early ({name}): {words}")

    def close(self) -> None:
        """Ask all processes to stop, wait, then kill whole process groups. Safe to call twice."""
        self._done.set()
        # Noted first: when a child has ended, nothing says any more which processes it had started.
        groups = [child.pid for child in self._children]
        below = [process for child in self._children for process in _descendants(child.pid)]
        # The hosts first, then the server that they use.
        for child in reversed(self._children):
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for child in self._children:
            try:
                child.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue
        for group in groups:
            try:
                os.killpg(group, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        for child in self._children:
            child.wait()
        # The server's children lead process groups of their own, which killing the server's group does not reach.
        _, alive = psutil.wait_procs(below, timeout=STOP_SECONDS)
        for process in alive:
            process.kill()
        # Ctrl-C may have interrupted this thread while it held the lock of `events`; then the readers wait for ever.
        # They are daemon threads, so the process can end without them: one deadline for all.
        deadline = time.monotonic() + READER_SECONDS
        for thread in (self._meter, *self._readers):
            thread.join(max(0.0, deadline - time.monotonic()))
        if not any(reader.is_alive() for reader in self._readers):
            for child in self._children:
                _stdout(child).close()
        self._children.clear()

    def _start(self, command: list[str], errors: IO[bytes]) -> subprocess.Popen[bytes]:
        # Its own session: Ctrl-C in the terminal reaches this process alone, which then ends the others in order.
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
        )
        self._children.append(child)
        return child

    def _read_in_thread(self, read: object) -> None:
        if callable(read):
            thread = threading.Thread(target=read, daemon=True)
            thread.start()
            self._readers.append(thread)

    def _measure_memory(self) -> None:
        here = psutil.Process()
        while not self._done.wait(0.5):
            total = _memory(here)
            for process in _descendants(here.pid):
                total += _memory(process)
            self.peak_memory = max(self.peak_memory, total)


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _memory(process: psutil.Process) -> int:
    """Bytes of memory that this process accounts for; pages shared by n processes count 1/n for each, where known."""
    try:
        full = process.memory_full_info()
        return int(getattr(full, "pss", full.rss))
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0


def _stdout(child: subprocess.Popen[bytes]) -> IO[bytes]:
    if child.stdout is None:
        raise CommandError("a process was started without a pipe to read from")
    return child.stdout


def _last_line(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("archipel: ") if lines else ""
