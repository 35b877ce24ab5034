"""A proxy of bytes, as TCP load balancers are: it cuts a connection off over which nothing has gone for a while."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_PART = 1 << 16


class IdleProxy:
    """Listens on 127.0.0.1 at `port`, and passes everything on to `target`.

    Arguments:
        target: the server's port.
        idle: seconds of silence, in both directions, after which a connection is closed at both ends.
    """

    def __init__(self, target: int, idle: float) -> None:
        self._target, self.idle = target, idle
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.opened = 0
        self.cuts: list[float] = []
        """When connections were cut off, by the monotonic clock."""
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def listen(self) -> None:
        while not self._closed.is_set():
            with suppress(OSError):
                if not select.select([self._listener], [], [], 0.1)[0]:
                    continue
                near, _ = self._listener.accept()
                self.opened += 1
                thread = threading.Thread(target=self._carry, args=(near,))
                self._threads.append(thread)
                thread.start()

    def close(self) -> None:
        self._closed.set()
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def _carry(self, near: socket.socket) -> None:
        with near, suppress(OSError), socket.create_connection(("127.0.0.1", self._target)) as far:
            other, last = {near: far, far: near}, time.monotonic()
            while not self._closed.is_set():
                for ready in select.select([near, far], [], [], 0.05)[0]:
                    part = ready.recv(_PART)
                    if not part:
                        return
                    other[ready].sendall(part)
                    last = time.monotonic()
                if time.monotonic() - last > self.idle:
                    self.cuts.append(time.monotonic())
                    return


@contextmanager
def cutting(target: int, idle: float) -> Iterator[IdleProxy]:
    """A proxy that cuts silent connections off, as long as the block runs."""
    proxy = IdleProxy(target, idle)
    thread = threading.Thread(target=proxy.listen)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.close()
        thread.join()
