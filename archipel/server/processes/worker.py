"""gunicorn's threaded worker, in which no thread waits for a client that says nothing."""

from __future__ import annotations

import errno
import selectors
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from gunicorn.workers.gthread import TConn, ThreadWorker

CLOSING = 16
"""So many connections wait at once for their clients to close them, at most 2 s each; further ones do not wait."""
SILENT_SECONDS = 2.0
"""When the process is to end, a connection on which nothing has come is closed after this time."""
SWITCH_SECONDS = 0.001
"""After so long a thread lets another one run that waits for the interpreter; Python's own 5 ms are longer than most
requests take, which wait several times for each other."""
_GONE = (errno.EAGAIN, errno.EWOULDBLOCK, errno.ECONNABORTED)
_NO_FILES = (errno.EMFILE, errno.ENFILE)
_NO_FILES_SECONDS = 0.05


class Worker(ThreadWorker):  # type: ignore[misc]
    """Takes a thread for a connection once that has sent something, and closes connections in threads of their own.

    gunicorn gives each new connection a thread, which waits up to 5 s for its first byte: as many silent connections as
    there are threads would stop the server.

    gunicorn closes a connection as RFC 9112 (section 9.6) asks, so that the answer to a request that was not read to
    its end arrives: it waits up to 2 s for the client to close its end. It does so in the thread that accepts
    connections and hands out requests, and clients that just stay would stop the whole server.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # gunicorn keeps room for as many as there are threads, most of which serve check-ins and pages that wait.
        most: int = self.worker_connections
        self.max_keepalived = max(most - self.cfg.threads, most // 2)

    @classmethod
    def check_config(cls, cfg: Any, log: Any) -> None:
        """Called at the start. gunicorn warns here where connections are fewer than threads; see `__init__`."""

    def init_process(self) -> None:
        """Called in the new process; serves until it ends."""
        sys.setswitchinterval(SWITCH_SECONDS)
        self._closers = ThreadPoolExecutor(CLOSING, thread_name_prefix="closing")
        self._places = threading.Semaphore(CLOSING)
        super().init_process()

    def handle_exit(self, sig: Any, frame: Any) -> None:
        """Called when the process is to end: answers the devices that wait, and ends the streams of open pages, all of
        which would keep it from ending."""
        super().handle_exit(sig, frame)
        # Not here: a signal may come while this thread holds a lock.
        self.method_queue.defer(self._end_what_waits)

    def _end_what_waits(self) -> None:
        # gunicorn does the same with idle connections. Who has just connected may be sending a request.
        soon = time.monotonic() + SILENT_SECONDS
        for conn in self.pending_conns:
            conn.timeout = min(conn.timeout, soon)
        app = getattr(self, "wsgi", None)
        if app is not None:
            app.extensions["archipel"].held.close()
            app.extensions["archipel.live"].close()

    def accept(self, listener: Any) -> None:
        """Called when somebody connects. The connection waits, as an idle one does, until it can be read from."""
        try:
            client, address = listener.accept()
        except OSError as error:
            if error.errno in _GONE:
                return
            if error.errno in _NO_FILES:
                # It stays in the queue until the process has closed a file. `allow_connections` sees to it that this is
                # rare; gunicorn would end the process.
                time.sleep(_NO_FILES_SECONDS)
                return
            raise
        self.nr_conns += 1
        conn = TConn(self.cfg, client, address, listener.getsockname())
        # The process may have been told to end since the poller was asked who connects.
        conn.timeout = time.monotonic() + (self.cfg.keepalive if self.alive else SILENT_SECONDS)
        self.pending_conns.append(conn)
        self.poller.register(client, selectors.EVENT_READ, partial(self.on_pending_socket_readable, conn))

    def enqueue_req(self, conn: Any) -> None:
        """Have a connection's next request served."""
        vars(conn)["close"] = partial(self._close, conn)
        super().enqueue_req(conn)

    def _close(self, conn: Any, graceful: bool = False) -> None:
        # From here on it is the method of its class again, and nothing in it leads back to it.
        vars(conn).pop("close", None)
        if graceful and self._places.acquire(blocking=False):
            self._closers.submit(self._close_and_wait, conn)
        else:
            conn.close()

    def _close_and_wait(self, conn: Any) -> None:
        try:
            conn.close(graceful=True)
        finally:
            self._places.release()
