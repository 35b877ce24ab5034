"""gunicorn's threaded worker, of which the thread that accepts connections waits for no client."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from gunicorn.workers.gthread import ThreadWorker

CLOSING = 16
"""So many connections wait at once for their clients to close them, at most 2 s each; further ones do not wait."""


class Worker(ThreadWorker):  # type: ignore[misc]
    """Closes connections in threads of their own.

    gunicorn closes a connection as RFC 9112 (section 9.6) asks, so that the answer to a request that was not read to
    its end arrives: it waits up to 2 s for the client to close its end. It does so in the thread that accepts
    connections and hands out requests, and clients that just stay would stop the whole server.
    """

    def init_process(self) -> None:
        """Called in the new process; serves until it ends."""
        self._closers = ThreadPoolExecutor(CLOSING, thread_name_prefix="closing")
        self._places = threading.Semaphore(CLOSING)
        super().init_process()

    def handle_exit(self, sig: Any, frame: Any) -> None:
        """Called when the process is to end: answers the devices that wait, and ends the streams of open pages, all of
        which would keep it from ending."""
        super().handle_exit(sig, frame)
        # Not here: a signal may come while this thread holds a lock.
        self.method_queue.defer(self._answer_held)

    def _answer_held(self) -> None:
        app = getattr(self, "wsgi", None)
        if app is not None:
            app.extensions["archipel"].held.close()
            app.extensions["archipel.live"].close()

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
