"""A small server for one page, which only this machine's browser reaches.

It listens on the loopback interface and answers one address, which has a random part: other users of the machine do not
know it. It answers requests alone that name the loopback address as their host, so that a page of another origin
cannot read it under a name of its own that leads here (DNS rebinding).
"""

from __future__ import annotations

import gzip
import secrets
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any

from archipel.errors import ArchipelError, InsightError
from archipel.insight.page import policy

_HOST = "127.0.0.1"


class PageServer:
    """Serves what `make` gives, which is called for each visit, one at a time.

    Arguments:
        make: the page as HTML.
        port: 0: any that is free.

    Raises InsightError where the port cannot be had.

    Example:
        server = PageServer(lambda: render(page))
        print(server.address)
        server.run()
    """

    def __init__(self, make: Callable[[], str], port: int = 0) -> None:
        self._path = f"/{secrets.token_urlsafe(16)}/"
        self._make, self._lock = make, Lock()
        try:
            self._server = ThreadingHTTPServer((_HOST, port), self._handler())
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InsightError(f"port {port}: {reason}; give another --port, or none for any that is free") from None
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self.address = f"http://{_HOST}:{self.port}{self._path}"

    def run(self) -> None:
        """Answer until `stop`, or an interrupt."""
        try:
            self._server.serve_forever()
        finally:
            self._server.server_close()

    def stop(self) -> None:
        """End `run`, from another thread."""
        self._server.shutdown()

    def _handler(server) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 30

            def do_GET(self) -> None:
                self._answer()

            def do_HEAD(self) -> None:
                self._answer()

            def _answer(self) -> None:
                hosts = (f"{_HOST}:{server.port}", f"localhost:{server.port}")
                if self.headers.get("Host") not in hosts:
                    self._send(HTTPStatus.MISDIRECTED_REQUEST, "this server answers to its loopback address alone")
                elif not secrets.compare_digest(self.path.encode(), server._path.encode()):
                    self._send(HTTPStatus.NOT_FOUND, "there is no such page; open the address that the command printed")
                else:
                    with server._lock:
                        try:
                            page = server._make()
                        except (ArchipelError, OSError) as error:
                            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, f"the page cannot be made: {error}")
                            return
                    self._send(HTTPStatus.OK, page, "text/html")

            def _send(self, status: HTTPStatus, text: str, kind: str = "text/plain") -> None:
                body = text.encode()
                packed = "gzip" in self.headers.get("Accept-Encoding", "")
                if packed:
                    body = gzip.compress(body, 1)
                self.send_response(status)
                self.send_header("Content-Type", f"{kind}; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Content-Security-Policy", f"{policy()}; frame-ancestors 'none'")
                self.send_header("X-Content-Type-Options", "nosniff")
                self.send_header("Referrer-Policy", "no-referrer")
                self.send_header("Cross-Origin-Resource-Policy", "same-origin")
                self.send_header("Cache-Control", "no-store")
                if packed:
                    self.send_header("Content-Encoding", "gzip")
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def log_message(self, format: str, *given: Any) -> None:
                """Nothing: whoever opened the page sees it."""

        return Handler
