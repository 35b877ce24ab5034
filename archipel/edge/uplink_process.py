"""Runs the uplink as a process of its own, which the supervisor of an edge server starts and ends."""

from __future__ import annotations

import logging
import os
import sys
import threading

from archipel.edge.uplink import check_upstream, run_uplink
from archipel.errors import ArchipelError
from archipel.server.processes import children
from archipel.server.processes.parent import end_with_parent
from archipel.server.processes.stopping import Stop
from archipel.server.services import Services


def main() -> int:
    """Entry point of the child process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    stop, over = Stop(), threading.Event()
    failed: list[BaseException] = []
    with stop.on_signals():
        try:
            end_with_parent(children.parent())
            services = Services.open(children.settings_from_environment())
            upstream = check_upstream(services)
            ready = int(os.environ[children.READY_FD])
            os.write(ready, b"1")
            os.close(ready)
        except ArchipelError as error:
            print(error, file=sys.stderr)
            return 1

        def work() -> None:
            try:
                run_uplink(services, upstream, over)
            except BaseException as error:  # noqa: BLE001 - raised again by the main thread
                failed.append(error)
            finally:
                stop.set()

        # The agent waits for an event, which no signal handler may set.
        thread = threading.Thread(target=work)
        thread.start()
        while not stop.wait(3600.0):
            pass
        over.set()
        thread.join()
    services.database.dispose()
    if failed:
        if not isinstance(failed[0], ArchipelError):
            raise failed[0]
        print(failed[0], file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
