"""A proxy between agents and their server that fails as it is told."""

from __future__ import annotations

import http.client
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.support.in_thread import in_thread

Answer = tuple[int, list[tuple[str, str]], bytes]
Forward = Callable[[], Answer]
Fault = Callable[["Handler", Forward], None]
"""What happens to a request instead of passing it on: gets the connection, and what does pass it on."""


class Proxy(ThreadingHTTPServer):
    """Passes requests on to `target`. `fault(method, path)` says what happens to one instead, None: nothing.

    An agent whose server is URL/NAME is told apart from others: its paths begin with /NAME, which is not passed on.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, target: int, host: str = "127.0.0.1") -> None:
        super().__init__((host, 0), Handler)
        self.target = target
        self.fault: Callable[[str, str], Fault | None] = lambda method, path: None
        self.came: list[tuple[str, str, bytes]] = []
        """Every request: method, path, body."""
        self.seen: list[tuple[str, str, int, bytes]] = []
        """Those that the server answered, with its status."""
        self.lock = threading.Lock()
        self.late: list[threading.Timer] = []

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_port}"

    def puts(self, path: str) -> list[bytes]:
        return [body for method, where, _, body in self.seen if method == "PUT" and where.endswith(path)]

    def handle_error(self, request: object, client_address: object) -> None:
        pass


@contextmanager
def running(proxy: Proxy) -> Iterator[Proxy]:
    try:
        with in_thread(proxy):
            yield proxy
    finally:
        for timer in proxy.late:
            timer.cancel()
            timer.join()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def _pass(self) -> None:
        length = int(self.headers.get("Content-Length", "0"))
        body = self.rfile.read(length)
        if len(body) < length:
            # The agent was killed while it sent this. A part of a message is none, and no server answers it.
            self.close_connection = True
            return

        def forward() -> Answer:
            connection = http.client.HTTPConnection("127.0.0.1", self.server.target, timeout=10)
            try:
                path = re.sub("^/(?!v1/)[^/]+", "", self.path)
                connection.request(self.command, path, body or None, dict(self.headers))
                response = connection.getresponse()
                result = response.status, response.getheaders(), response.read()
            finally:
                connection.close()
            with self.server.lock:
                self.server.seen.append((self.command, self.path, result[0], body))
            return result

        with self.server.lock:
            self.server.came.append((self.command, self.path, body))
            fault = self.server.fault(self.command, self.path)
        try:
            if fault is not None:
                self.close_connection = True
                fault(self, forward)
            else:
                self.answer(*forward())
        except (OSError, http.client.HTTPException):
            # The server or the agent is gone: so is the connection.
            self.close_connection = True

    def answer(self, status: int, headers: list[tuple[str, str]], body: bytes, cut: int | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("connection", "transfer-encoding"):
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[:cut])

    do_GET = do_PUT = do_POST = do_OPTIONS = _pass

    def log_message(self, *args: object) -> None:
        pass


def status(code: int, **headers: str) -> Fault:
    """The server is not asked; the answer is a problem of the proxy's own."""

    def fault(handler: Handler, forward: Forward) -> None:
        body = b'{"type":"made up","title":"by","status":%d,"detail":"the proxy","request_id":"1"}' % code
        more = [(name.replace("_", "-"), value) for name, value in headers.items()]
        handler.answer(code, [("Content-Length", str(len(body))), ("Connection", "close"), *more], body)

    return fault


def lost_request(handler: Handler, forward: Forward) -> None:
    handler.connection.close()


def lost_answer(handler: Handler, forward: Forward) -> None:
    forward()
    handler.connection.close()


def reset(handler: Handler, forward: Forward) -> None:
    """The connection is broken off in the middle of the answer."""
    code, headers, body = forward()
    handler.answer(code, headers, body, cut=len(body) // 2)
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


def truncated(handler: Handler, forward: Forward) -> None:
    code, headers, body = forward()
    handler.answer(code, headers, body, cut=len(body) // 2)


def garbage(handler: Handler, forward: Forward) -> None:
    code, headers, body = forward()
    handler.answer(code, headers, bytes(255 - byte for byte in body))


def noise(handler: Handler, forward: Forward) -> None:
    """Not even HTTP."""
    forward()
    handler.wfile.write(bytes(range(256)) * 8)


def page(handler: Handler, forward: Forward) -> None:
    """As a hotel's network answers before one has paid."""
    body = b"<!doctype html><title>Please log in</title>"
    handler.answer(200, [("Content-Type", "text/html"), ("Content-Length", str(len(body)))], body)


def delayed(seconds: float) -> Fault:
    def fault(handler: Handler, forward: Forward) -> None:
        code, headers, body = forward()
        time.sleep(seconds)
        handler.answer(code, headers, body)

    return fault


slow = delayed(0.1)


def dripping(handler: Handler, forward: Forward) -> None:
    """The answer comes in pieces of some bytes."""
    code, headers, body = forward()
    handler.answer(code, headers, b"")
    for start in range(0, len(body), 64):
        handler.wfile.write(body[start : start + 64])
        time.sleep(0.01)


def silent(seconds: float) -> Fault:
    """The connection stays open and nothing comes: the other end does not know that it is the only one."""

    def fault(handler: Handler, forward: Forward) -> None:
        time.sleep(seconds)

    return fault


def twice(handler: Handler, forward: Forward) -> None:
    """The request is delivered two times; the second answer counts."""
    forward()
    handler.answer(*forward())


def overtaken(seconds: float) -> Fault:
    """The request is delivered after its sender has given it up, and maybe sent it again or gone on."""

    def fault(handler: Handler, forward: Forward) -> None:
        def deliver() -> None:
            try:
                forward()
            except (OSError, http.client.HTTPException):
                return  # into the void, then

        timer = threading.Timer(seconds, deliver)
        timer.daemon = True
        timer.start()
        with handler.server.lock:
            handler.server.late = [*(each for each in handler.server.late if each.is_alive()), timer]
        handler.connection.close()

    return fault


MENDED: dict[str, Fault] = {
    "request lost": lost_request,
    "answer lost": lost_answer,
    "truncated": truncated,
    "garbage": garbage,
    "slow": slow,
    "429": status(429, Retry_After="0.05"),
    "503": status(503, Retry_After="0.05"),
    "401": status(401),
    "reset": reset,
    "noise": noise,
    "page": page,
    "dripping": dripping,
    "silent": silent(0.6),
    "twice": twice,
    "overtaken": overtaken(0.3),
    "502": status(502),
}
"""Faults after which the same request, sent again, gets its answer."""
