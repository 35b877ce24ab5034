"""The coordinator as a process of its own: one per data folder, one at work per database, ends with its supervisor."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from archipel.errors import ArchipelError, ServerError
from archipel.server import children
from archipel.server.coordinator import Coordinator
from archipel.server.lease import Lease
from archipel.server.parent import end_with_parent
from archipel.server.services import Services
from archipel.server.settings import Settings
from archipel.server.stopping import Stop

LOCK_FILE = "coordinator.lock"


def run_coordinator(settings: Settings, *, stop: Stop | None = None, ready: int | None = None) -> None:
    """Coordinate until `stop` is set or SIGTERM or SIGINT comes. `ready`: a file descriptor that gets one byte then.

    Raises ServerError when another coordinator works on the data folder or the database cannot be used.
    """
    stop = stop or Stop()
    with stop.on_signals(), _only_one(settings.path(LOCK_FILE)) as holder:
        services = Services.open(settings)
        settings.private_key  # noqa: B018 - fail now, not in the first round
        services.prepare()
        if ready is not None:
            os.write(ready, b"1")
            os.close(ready)
        lease = Lease(services.database, holder, clock=services.clock, seconds=settings.lease_seconds)
        Coordinator(services, lease).run(stop)
        services.database.dispose()


def main() -> int:
    """Entry point of the child process that the supervisor starts."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    try:
        end_with_parent(children.parent())
        run_coordinator(children.settings_from_environment(), ready=int(os.environ[children.READY_FD]))
    except ArchipelError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


@contextmanager
def _only_one(path: Path) -> Iterator[str]:
    """Lock the data folder; gives the id under which it holds the lease, which the lock file keeps."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ServerError(f"{path}: cannot be written ({error.strerror})") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ServerError(f"{path.parent}: another server is running on this data folder") from None
        kept = os.pread(handle, 64, 0).decode("ascii", "replace")
        if not re.fullmatch("[0-9a-f]{32}", kept):
            kept = secrets.token_hex(16)
            os.ftruncate(handle, 0)
            os.pwrite(handle, kept.encode(), 0)
            os.fsync(handle)
        yield kept
    finally:
        os.close(handle)


if __name__ == "__main__":
    sys.exit(main())
