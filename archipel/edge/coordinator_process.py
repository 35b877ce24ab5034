"""The coordinator of an edge server, with its uplink in a thread of the same process.

Both import almost the same, so two processes would need tens of megabytes more. Neither waits for the other: the uplink
has a database connection of its own, and whatever it fails of is logged, and it begins again. A kill ends both, and
each goes on from any point (tests/edge/kills).
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from archipel.edge.uplink import check_upstream, run_uplink
from archipel.errors import ArchipelError
from archipel.protocol.backoff import Backoff
from archipel.server.processes import coordinator_process
from archipel.server.services import Services
from archipel.server.settings import Settings

log = logging.getLogger("archipel.edge")

AGAIN = Backoff(0.5, longest=30.0)
STEADY_SECONDS = 60.0
"""An uplink that worked for so long begins again as quickly as the first time."""


@contextmanager
def uplink_beside(services: Services) -> Iterator[None]:
    """Run the uplink while the block lasts. At the end it leaves the round that it is in, within `stop_seconds`."""
    over = threading.Event()
    # A daemon: an upstream that does not answer keeps nobody from ending.
    thread = threading.Thread(target=_keep, args=(services.settings, over), name="uplink", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(services.settings.stop_seconds)


def _keep(settings: Settings, over: threading.Event) -> None:
    failures = 0
    while not over.is_set():
        began = time.monotonic()
        try:
            services = Services.open(settings)
            try:
                run_uplink(services, check_upstream(services), over)
            finally:
                services.database.dispose()
        except ArchipelError as error:
            why = str(error)
        except Exception:
            log.exception("the uplink failed")
            why = "see above"
        else:
            return
        failures = 1 if time.monotonic() - began > STEADY_SECONDS else failures + 1
        delay = AGAIN.after(failures)
        log.error("the uplink ended (%s); it begins again in %.1f s", why, delay)
        over.wait(delay)


if __name__ == "__main__":
    sys.exit(coordinator_process.main(uplink_beside))
