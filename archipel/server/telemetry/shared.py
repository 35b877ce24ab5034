"""One folder in which all processes of a server keep their measurements, so that one address shows them all.

It is prometheus-client's multiprocess mode, with names in place of process ids: a web process takes the first name that
nobody has, such as `web-0`. One that is started for another that died goes on with that one's numbers. So nothing that
was counted is lost with a process, and the folder has as many files as there are processes, however often they die.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable
from itertools import count
from pathlib import Path

from prometheus_client import Metric, multiprocess, values

from archipel.durable import open_locked
from archipel.errors import LockedError, ServerError
from archipel.server.settings import Settings
from archipel.server.telemetry.measures import Measures

FOLDER = "metrics"
"""Name of the folder in the data folder."""
_LIBRARY_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""The variable in which prometheus-client looks for the folder."""
_MOST_PROCESSES = 1024
_held: list[int] = []
"""The handles of this process's lock; closing them would give up its name."""


def begin(settings: Settings) -> None:
    """Empty the folder when a server starts, and keep other servers out of it. Raises ServerError."""
    folder = settings.path(FOLDER)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        _held.append(open_locked(folder / "server.lock"))
        for path in folder.iterdir():
            if path.suffix in (".db", ".pid"):
                path.unlink()
    except LockedError:
        raise ServerError(f"{settings.folder}: another server is running on this data folder") from None
    except OSError as error:
        raise ServerError(f"{folder}: cannot be written ({error.strerror})") from None


def end(settings: Settings) -> None:
    """Remove the folder when the server has ended."""
    shutil.rmtree(settings.path(FOLDER), ignore_errors=True)
    while _held:
        os.close(_held.pop())


def open_measures(settings: Settings, kind: str) -> Measures:
    """This process's measurements, in a file of its own.

    Called once in a process, before anything is measured. `kind` is "web" or "coordinator". Raises ServerError.
    """
    folder = settings.path(FOLDER)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        name = _take_name(folder, kind)
        os.environ[_LIBRARY_FOLDER] = str(folder)
        values.ValueClass = values.MultiProcessValue(lambda: name)  # type: ignore[no-untyped-call]
        measures = Measures()
    except OSError as error:
        raise ServerError(f"{folder}: cannot be written ({error.strerror})") from None
    measures.flush_for_ever()
    return measures


def _take_name(folder: Path, kind: str) -> str:
    for number in count():
        name = f"{kind}-{number}"
        try:
            handle = open_locked(folder / f"{name}.lock")
        except LockedError:
            if number == _MOST_PROCESSES:
                raise
            continue
        _held.append(handle)
        (folder / f"{name}.pid").write_text(str(os.getpid()))
        return name
    raise AssertionError("count() has no end")


def read_measures(settings: Settings) -> Iterable[Metric]:
    """The measurements of all processes, added up. Raises OSError or RuntimeError for a damaged file."""
    files = sorted(str(path) for path in settings.path(FOLDER).glob("*.db"))
    merged: Iterable[Metric] = multiprocess.MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call]
    return merged


def read_processes(settings: Settings) -> dict[str, int]:
    """Process ids by name, of processes that may have ended since."""
    found = {}
    for path in settings.path(FOLDER).glob("*.pid"):
        text = path.read_text()
        if text.isdecimal():
            found[path.stem] = int(text)
    return found


def resident_bytes(process: int) -> int | None:
    """How much memory the process has; None where the system does not say, or the process has ended."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def started_at(process: int) -> float | None:
    """When the process began, in Unix seconds; None as above."""
    try:
        ticks = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return round(time.time() - up + ticks / os.sysconf("SC_CLK_TCK"), 1)
