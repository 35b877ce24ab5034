"""A slow link that breaks: it passes bytes on at a rate, and cuts connections by chance."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from socketserver import BaseRequestHandler, ThreadingTCPServer

CHUNK = 64 << 10


class Wire(ThreadingTCPServer):
    """Passes connections on to `target` on this machine.

    `rate` (bytes/s) holds for each direction; after each CHUNK bytes a connection is cut with the chance `cut`.
    `passed` and `cuts` count bytes and cuts of either direction, "up" being to the target.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, target: int, rate: float, cut: float, seed: int) -> None:
        super().__init__(("127.0.0.1", 0), Ends)
        self.target, self.rate, self.cut = target, rate, cut
        self.random = random.Random(seed)
        self.passed: Counter[str] = Counter()
        self.cuts: Counter[str] = Counter()
        self._free = {"up": 0.0, "down": 0.0}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def carry(self, way: str, count: int) -> bool:
        """Wait until the link has carried so many bytes; whether it is there still."""
        with self._lock:
            self.passed[way] += count
            begin = max(self._free[way], time.monotonic())
            self._free[way] = begin + count / self.rate
            until = self._free[way]
            whole = self.random.random() >= self.cut * count / CHUNK
            if not whole:
                self.cuts[way] += 1
        time.sleep(max(until - time.monotonic(), 0.0))
        return whole


class BreaksOnce(Wire):
    """Carries up at `rate` and down at once, and is cut once: when `after` bytes have gone up."""

    def __init__(self, target: int, rate: float, after: int) -> None:
        super().__init__(target, rate, 0.0, seed=0)
        self.after = after

    def carry(self, way: str, count: int) -> bool:
        if way == "down":
            self.passed[way] += count
            return True
        super().carry(way, count)
        if self.cuts[way] or self.passed[way] < self.after:
            return True
        self.cuts[way] += 1
        return False


class Ends(BaseRequestHandler):
    """One connection."""

    server: Wire

    def handle(self) -> None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.server.target)) as onward:
            back = threading.Thread(target=self._pump, args=(onward, self.request, "down"), daemon=True)
            back.start()
            self._pump(self.request, onward, "up")
            back.join()

    def _pump(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        with suppress(OSError):
            while data := source.recv(CHUNK):
                if not self.server.carry(way, len(data)):
                    break
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
