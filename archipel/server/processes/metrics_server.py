"""Serves /metrics on a port of its own, for Prometheus. The coordinator's process runs it, in threads of its own.

Whoever may read it is decided here: with a token whoever has it; without one only programs of this machine, because the
port is on loopback then. A web page in a browser of this machine cannot read it either: a request must name the port by
an address or as localhost, and a page that made its own name point here names that. Where other machines reach the port
and the server has a certificate, it speaks TLS, so that nobody on the way reads the token.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import ipaddress
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder

from archipel.errors import ServerError
from archipel.server.processes.figures import Figures
from archipel.server.processes.lease import Lease
from archipel.server.processes.tls import WebTls
from archipel.server.services import Services
from archipel.server.settings import Settings
from archipel.server.telemetry import shared

log = logging.getLogger("archipel.metrics")

STALL_SECONDS = 5.0
MOST_READERS = 8
"""Connections at once; further ones are closed, so that nobody takes the process's threads."""


class _Measured:
    """A collector of all processes' measurements."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def collect(self) -> Iterator[Metric]:
        yield from shared.read_measures(self._settings)


class MetricsServer(ThreadingHTTPServer):
    """Listens from the beginning on; `serve_forever` answers.

    Raises ServerError if it cannot listen, TlsError for a certificate that cannot be used.
    """

    daemon_threads = True

    def __init__(self, settings: Settings, registry: CollectorRegistry) -> None:
        self.settings, self.registry = settings, registry
        self._places = threading.Semaphore(MOST_READERS)
        self._tls = WebTls(settings) if settings.metrics_over_tls else None
        where = f"metrics_host {settings.metrics_host}, metrics_port {settings.metrics_port}"
        try:
            self.address_family, *_ = socket.getaddrinfo(
                settings.metrics_host, settings.metrics_port, type=socket.SOCK_STREAM
            )[0]
            super().__init__((settings.metrics_host, settings.metrics_port), _Handler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ServerError(f"{where}: in use by another program; choose another port") from None
            raise ServerError(f"{where}: cannot listen there ({error.strerror or error})") from None

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        if self._tls is None:
            super().finish_request(request, client_address)
            return
        # In the reader's own thread: nobody else waits for a handshake.
        request.settimeout(STALL_SECONDS)
        with self._tls().wrap_socket(request, server_side=True) as connection:
            super().finish_request(connection, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a reader of metrics went away", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer
    timeout = STALL_SECONDS
    server_version = "archipel"
    sys_version = ""

    def do_GET(self) -> None:
        settings = self.server.settings
        if self.path.partition("?")[0] != "/metrics":
            self._answer(404, "there is /metrics only\n")
        elif settings.metrics_token_sha256:
            if _has_token(self.headers.get("Authorization", ""), settings.metrics_token_sha256):
                self._show()
            else:
                self._answer(401, "this needs a token: 'Authorization: Bearer TOKEN'\n")
        elif _names_this_machine(self.headers.get("Host", "")):
            self._show()
        else:
            self._answer(403, "name this port by its address or as localhost\n")

    def _show(self) -> None:
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        try:
            body = encode(self.server.registry)
        except (OSError, RuntimeError) as error:
            log.warning("metrics cannot be read: %s", error)
            self._answer(503, "metrics cannot be read now; the server's log says why\n")
            return
        self._send(200, content_type, body)

    def _answer(self, status: int, text: str) -> None:
        self._send(status, "text/plain; charset=utf-8", text.encode())

    def _send(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *values: Any) -> None:
        """Write nothing: scrapes come all day, and what strangers send does not belong in the log."""


def _has_token(header: str, expected: str) -> bool:
    scheme, _, token = header.partition(" ")
    digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()
    return scheme.lower() == "bearer" and hmac.compare_digest(digest, expected)


def _names_this_machine(host: str) -> bool:
    """Whether a Host header has an IP address or `localhost`, which no name server of others can answer for."""
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.lower() == "localhost"
    return True


@contextmanager
def serving_metrics(services: Services, lease: Lease) -> Iterator[None]:
    """Serve /metrics while the block lasts, if the settings ask for it. Raises ServerError."""
    settings = services.settings
    if not settings.metrics_port:
        yield
        return
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Measured(settings))
    registry.register(Figures(services, lease))
    with MetricsServer(settings, registry) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True, name="metrics")
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
