"""The TLS context of the web processes. It is made again when its files change, so no restart is needed for that."""

from __future__ import annotations

import logging
import ssl
import threading
from pathlib import Path

from archipel.errors import TlsError
from archipel.protocol.tls import server_context
from archipel.server.settings import Settings

log = logging.getLogger("archipel.server")


def _socket_class(seconds: float) -> type[ssl.SSLSocket]:
    class TimedSocket(ssl.SSLSocket):
        """A socket on which no read and no handshake takes longer than `seconds`.

        The timeout that the supervisor sets on the listener does not hold for TLS, so "no timeout" means this one.
        """

        def settimeout(self, value: float | None) -> None:
            super().settimeout(seconds if value is None else value)

        def setblocking(self, flag: bool) -> None:
            self.settimeout(None if flag else 0.0)

    return TimedSocket


class WebTls:
    """Gives the TLS context for each connection. Making it raises TlsError if the files of `settings` are unusable."""

    def __init__(self, settings: Settings) -> None:
        self.certificate = settings.path(settings.tls_certificate)
        self.key = settings.path(settings.tls_key or settings.tls_certificate)
        self._authority = settings.path(settings.tls_client_ca) if settings.tls_client_ca else None
        self._socket_class = _socket_class(settings.stall_seconds)
        self._lock = threading.Lock()
        self._seen = self._changed()
        self._context = self._make()

    def __call__(self) -> ssl.SSLContext:
        with self._lock:
            changed = self._changed()
            if changed != self._seen:
                self._seen = changed
                try:
                    self._context = self._make()
                except TlsError as error:
                    # The files are wrong, or just being replaced one by one. The context before is still good.
                    log.warning("the certificate in use is kept: %s", error)
            return self._context

    def _make(self) -> ssl.SSLContext:
        context = server_context(self.certificate, self.key, self._authority)
        context.sslsocket_class = self._socket_class
        return context

    def _changed(self) -> list[tuple[int, int, int]]:
        return [_version(path) for path in (self.certificate, self.key, self._authority) if path is not None]


def _version(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError:  # missing while it is replaced; this differs from any file, so it is looked at again
        return (0, 0, 0)
    return (status.st_ino, status.st_size, status.st_mtime_ns)
