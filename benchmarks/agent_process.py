"""What the agent's benchmark reads of processes and of the wire: CPU time, memory, bytes through a proxy."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_CHUNK = 1 << 16


def family(pid: int) -> list[int]:
    """The process and all its living descendants."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents.setdefault(int(path.read_text().rsplit(")", 1)[1].split()[1]), []).append(int(path.parent.name))
    found = [pid]
    for each in found:
        found += parents.get(each, [])
    return found


def running_seconds(pid: int) -> float:
    """CPU seconds, to the nanosecond, of every thread that lives in the process and its descendants: what waits."""
    total = 0
    for each in family(pid):
        for path in Path(f"/proc/{each}/task").glob("*/schedstat"):
            with suppress(OSError):
                total += int(path.read_text().split()[0])
    return total / 1e9


def all_seconds(pid: int) -> float:
    """CPU seconds, in ticks of 10 ms, of the process and its descendants, those that ended included."""
    total = 0
    for each in family(pid):
        with suppress(OSError):
            fields = Path(f"/proc/{each}/stat").read_text().rsplit(")", 1)[1].split()
            total += sum(map(int, fields[11:15]))
    return total / _TICKS


def memory(pid: int) -> dict[str, float]:
    """MiB of the process and its descendants: resident (RSS), with what is shared divided (PSS), its own (USS)."""
    sums = dict.fromkeys(("RSS", "PSS", "USS"), 0)
    for each in family(pid):
        text = Path(f"/proc/{each}/smaps_rollup").read_text()
        kib = {name: int(size) for name, size in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
        sums["RSS"] += kib["Rss"]
        sums["PSS"] += kib["Pss"]
        sums["USS"] += kib["Private_Clean"] + kib["Private_Dirty"]
    return {name: size / 1024 for name, size in sums.items()}


class Proxy:
    """Stands before a server on loopback, passes everything on unchanged, and counts it in both directions.

    Bytes are those of the TCP streams, so request lines, headers and framing are in them.
    """

    def __init__(self, port: int) -> None:
        self._server = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._up: list[tuple[float, int]] = []
        self._down: list[tuple[float, int]] = []
        self._requests: list[tuple[float, bytes]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def bytes(self) -> tuple[int, int]:
        """Sent to the server and received from it, so far."""
        return self.until(float("inf"))

    def until(self, when: float) -> tuple[int, int]:
        """As `bytes`, of what had passed at `when`, by time.time()."""
        up, down = (sum(size for at, size in list(each) if at <= when) for each in (self._up, self._down))
        return up, down

    def arrivals(self, beginning: bytes) -> list[float]:
        """When requests that begin so arrived here, by time.time()."""
        return [when for when, head in list(self._requests) if head.startswith(beginning)]

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(("127.0.0.1", self._server))
                for each in (client, server):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for source, target, counted, look in (
                    (client, server, self._up, True),
                    (server, client, self._down, False),
                ):
                    threading.Thread(target=self._pump, args=(source, target, counted, look), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, counted: list[tuple[float, int]], look: bool) -> None:
        with suppress(OSError):
            while data := source.recv(_CHUNK):
                if look and data.startswith((b"POST ", b"GET ", b"PUT ")):
                    self._requests.append((time.time(), data[:80]))
                counted.append((time.time(), len(data)))
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextmanager
def proxy(port: int) -> Iterator[Proxy]:
    made = Proxy(port)
    try:
        yield made
    finally:
        made.close()


def wait_for(condition: Callable[[], object], what: str, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
