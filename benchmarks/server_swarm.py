"""Devices that poll a server, all in one thread: what they take of a processor must not count as the server's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

_decode: Callable[[bytes], Any] = msgspec.json.Decoder().decode
_LENGTH = b"content-length:"


class Swarm:
    """Devices that come again as they are told. Each keeps a connection of its own for as long as the server does.

    Arguments:
        where: Host and port.
        tokens: One for each device.
        first: Seconds until a device's first poll.
        wait: Seconds from an answer, decoded, to the device's next poll.
        keep: Whether connections stay open from one turn to the next.
    """

    def __init__(
        self,
        where: tuple[str, int],
        tokens: Sequence[str],
        first: Callable[[], float],
        wait: Callable[[Any], float],
        *,
        keep: bool,
    ) -> None:
        self.where, self._wait, self.keeps = where, wait, keep
        self._tokens = tokens
        # Seconds until each device is due, from the beginning of the next turn on.
        self._left = [first() for _ in tokens]
        self._lines: dict[int, _Line] = {}
        self.begin = self.end = 0.0
        self.found: list[float] = []
        self.asked = 0
        self._under_way = 0
        self._failed: Exception | None = None

    async def turn(self, seconds: float, warm_up: float) -> list[float]:
        """Poll for so long. Milliseconds of each check-in from when it was due to its answer.

        Those that are due in the first `warm_up` seconds are not among them. A device that is late because of the
        server is late by its own schedule: what waits behind a slow answer is counted.

        Raises:
            RuntimeError: An answer is not 200, or there is none.
        """
        loop = asyncio.get_running_loop()
        self.found, self.asked, self._failed = [], 0, None
        begin = loop.time()
        self.begin, self.end = begin + warm_up, begin + seconds
        for number, left in enumerate(self._left):
            self._left[number] = left - seconds
            if left < seconds:
                loop.call_at(begin + left, self._send, number, begin + left)
        while (loop.time() < self.end or self._under_way) and self._failed is None:
            await asyncio.sleep(0.05)
        if self._failed is not None:
            raise self._failed
        if not self.keeps:
            self.close()
        return self.found

    def close(self) -> None:
        """Close all connections."""
        while self._lines:
            self._lines.popitem()[1].transport.abort()

    def _send(self, number: int, due: float) -> None:
        self._under_way += 1
        line = self._lines.get(number)
        if line is None:
            task = asyncio.ensure_future(self._connect(number, due))
            task.add_done_callback(self._connected)
            return
        line.ask(due)

    async def _connect(self, number: int, due: float) -> None:
        loop = asyncio.get_running_loop()
        _, line = await loop.create_connection(lambda: _Line(self, number), *self.where)
        self._lines[number] = line
        line.ask(due)

    def _connected(self, task: asyncio.Future[None]) -> None:
        if task.exception() is not None:
            self._failed = RuntimeError(f"no connection: {task.exception()!r}")

    def request(self, number: int) -> bytes:
        """The bytes of a device's check-in."""
        return (
            f"POST /v1/check-ins HTTP/1.1\r\nHost: {self.where[0]}\r\nAuthorization: Bearer {self._tokens[number]}\r\n"
            "Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
        ).encode()

    def answered(self, number: int, due: float, head: bytes, body: bytes) -> None:
        """A device has its answer."""
        loop = asyncio.get_running_loop()
        self._under_way -= 1
        self.asked += 1
        now = loop.time()
        if not head.startswith(b"HTTP/1.1 200"):
            self._failed = RuntimeError(f"{head.splitlines()[0]!r} {body[:200]!r}")
            return
        if due >= self.begin:
            self.found.append((now - due) * 1e3)
        again = now + self._wait(_decode(body))
        if again < self.end:
            loop.call_at(again, self._send, number, again)
        else:
            self._left[number] = again - self.end

    def lost(self, number: int, line: _Line, due: float | None) -> None:
        """A connection has ended. A check-in that had no answer is sent again, as devices do."""
        if self._lines.get(number) is line:
            del self._lines[number]
        if due is not None:
            self._under_way -= 1
            self._send(number, due)


class _Line(asyncio.Protocol):
    """One device's connection."""

    transport: asyncio.Transport

    def __init__(self, swarm: Swarm, number: int) -> None:
        self._swarm, self._number = swarm, number
        self._due: float | None = None
        self._read = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def ask(self, due: float) -> None:
        self._due = due
        self.transport.write(self._swarm.request(self._number))

    def data_received(self, data: bytes) -> None:
        self._read += data
        head, found, body = self._read.partition(b"\r\n\r\n")
        lower = head.lower()
        at = lower.find(_LENGTH)
        if not found or len(body) < int(lower[at + len(_LENGTH) :].split(b"\r\n", 1)[0]):
            return
        due, self._due, self._read = self._due, None, b""
        assert due is not None
        # Before the answer is counted: the device's next check-in must not use a connection that ends.
        if b"connection: close" in lower:
            self._swarm.lost(self._number, self, None)
            self.transport.close()
        self._swarm.answered(self._number, due, head, body)

    def connection_lost(self, error: Exception | None) -> None:
        self._swarm.lost(self._number, self, self._due)
        self._due = None
