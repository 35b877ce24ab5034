"""Devices as `archipel device` runs them, in processes of their own."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from tests.support.federation import Federation
from tests.support.linear_bundle import local_data

QUICK = "backoff = 0.02\nattempts = 3\npatience = 3.0\npause_seconds = 0.05\nmax_wait = 1.0\n"


class Device:
    """Settings, examples and token of one device, and its agent's process."""

    def __init__(self, folder: Path, number: int, token: bytes = b"") -> None:
        self.place = folder / f"place-{number}"
        self.place.mkdir()
        self.folder = self.place / "device"
        self.config = self.place / "device.toml"
        self.token = self.place / "my.token"
        self.token.write_bytes(token)
        np.savez(self.place / "data.npz", **local_data(number))  # type: ignore[arg-type]
        self.settings(isolated="false")
        self.process: subprocess.Popen[bytes]
        """The last one that was started."""

    def settings(self, text: str = '[examples]\nfile = "data.npz"\n', **top: str) -> None:
        lines = "".join(f"{name} = {value}\n" for name, value in top.items())
        self.config.write_text(f'folder = "device"\n{QUICK}{lines}{text}')

    def start(self, *options: str, **environment: str) -> None:
        """`run --json`; its lines are in `events`."""
        command = [sys.executable, "-m", "archipel", "device", "run", str(self.config), "--json", *options]
        process = self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **environment}
        )
        self.lines: queue.Queue[bytes] = queue.Queue()
        self._reader = threading.Thread(target=self._read, args=(process.stdout,))
        self._reader.start()

    def _read(self, out: IO[bytes]) -> None:
        for line in out:
            self.lines.put(line)

    @property
    def alive(self) -> bool:
        return hasattr(self, "process") and self.process.poll() is None

    def until(self, name: str, seconds: float = 20.0) -> dict[str, Any]:
        """The next event of that name; those before it are passed over."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                event: dict[str, Any] = msgspec.json.decode(
                    self.lines.get(timeout=max(0.0, deadline - time.monotonic()))
                )
            except queue.Empty:
                raise AssertionError(f"no event {name!r} in {seconds} s") from None
            if event["event"] == name:
                return event

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        code = int(self.process.wait(20))
        self._reader.join()
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.process.stdout.close()
        self.error = self.process.stderr.read().decode()
        self.process.stderr.close()
        return code


def run_beside(federation: Federation, work: Callable[[], object], **more: Any) -> None:
    """`work` while two more devices take part."""
    others = [federation.agent(number, **more) for number in (1, 2)]
    done = threading.Event()
    thread = threading.Thread(target=federation.run, args=(others, done.is_set))
    thread.start()
    try:
        work()
    finally:
        done.set()
        thread.join()
