"""A server that answers over TCP: the web application and a coordinator, in threads."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler

from archipel.server import create_app
from archipel.server.processes.coordinator import Coordinator
from archipel.server.services import Services
from archipel.server.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterable
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment


class _Web(ThreadedWSGIServer):
    """Knows its connections, so that they can be closed, and waits for its threads."""

    daemon_threads = False

    def __init__(self, host: str, port: int, app: WSGIApplication) -> None:
        self.connections: set[socket.socket] = set()
        super().__init__(host, port, app, _Handler)


class _Handler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Web

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        with suppress(OSError):
            super().finish()

    def connection_dropped(self, error: BaseException, environ: WSGIEnvironment | None = None) -> None:
        # Werkzeug closes an answer only where it can still read from the client.
        if environ is not None and "tests.answer" in environ:
            environ["tests.answer"].close()

    def log(self, type: str, message: str, *args: object) -> None:
        pass


class ServerProcess:
    """The web application in threads and a coordinator in another, in this process, on one port."""

    def __init__(self, settings: Settings, host: str = "127.0.0.1", *, coordinates: bool = True) -> None:
        """`coordinates`: else somebody else coordinates."""
        self.settings = settings
        self._coordinates = coordinates
        self._host = host
        self._services = Services.open(settings)
        self._services.prepare()
        self._stop = threading.Event()
        self.port = 0
        self.start()

    def start(self) -> None:
        self._app = create_app(self.settings)

        def answering(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            answer = environ["tests.answer"] = self._app(environ, start_response)
            return answer

        self._web = _Web(self._host, self.port, answering)
        self.port = self._web.server_port
        self._stop.clear()
        self._threads = [
            threading.Thread(target=self._web.serve_forever, kwargs={"poll_interval": 0.02}),
            *(
                [threading.Thread(target=Coordinator(self._services).run, args=(self._stop,))]
                if self._coordinates
                else []
            ),
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._app.extensions["archipel"].held.close()
        self._web.shutdown()
        for thread in self._threads:
            thread.join()
        for connection in list(self._web.connections):
            # Nothing more is read; what is being answered is answered.
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RD)
        self._web.server_close()
        self._app.extensions["archipel"].database.dispose()

    def close(self) -> None:
        self.stop()
        self._services.database.dispose()
