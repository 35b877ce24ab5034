"""A day of a server in minutes: does its memory stay flat?

The server's real web application and coordinator run in one process, on a clock that jumps. Devices check in as often
as they are told, train in rounds of a task, and upload updates. After each simulated hour the process's memory (RSS)
is printed, and how much of it SQLite has, of which each connection keeps up to 2 MB of pages. The end is the slope over
the second half of the day: until then these caches fill, as the database is smaller than they are.

Bound: MOST_SLOPE. A leak of an object of 150 bytes for each of some 1,800 check-ins an hour would reach it.

    python benchmarks/server_day.py            # 24 hours of 20 devices, some minutes
    python benchmarks/server_day.py --quick    # 4 hours of 12 devices, under a minute; too short for the slope
"""

from __future__ import annotations

import _sqlite3
import ctypes
import gc
import hashlib
import math
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from measure import arguments, print_alone, state_run
from server_load import POPULATION, Fleet
from werkzeug.test import EnvironBuilder, run_wsgi_app

from archipel.bundle import write_weights
from archipel.protocol.messages import CheckInResponse, RoundPlan
from archipel.protocol.operator.tasks import TaskRequest
from archipel.protocol.sealed import decode
from archipel.server import create_app
from archipel.server.processes.coordinator import Coordinator
from archipel.server.services import Services

MOST_SLOPE = 0.25
"""MiB an hour."""
HOURS = 24
"""In half of them SQLite's pages fill their caches."""
ENTRIES, COHORT = 1000, 10
POLL_SECONDS = 300.0
"""While rounds take place devices come ten times as often."""
STEP_SECONDS = 20.0
"""How far the clock jumps between two steps of the coordinator."""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--hours", type=int, help=f"so many in place of {HOURS}")
    options = parser.parse_args()
    hours, devices = (4, 12) if options.quick else (HOURS, 20)
    hours = hours if options.hours is None else options.hours
    if hours < 4:
        parser.error(f"--hours {hours}: a slope over the second half needs 4 or more")
    state_run(options.json, ("flask", "sqlalchemy", "numpy"))
    # In memory, where there is such a folder: it is not the disk that is measured.
    disk = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="archipel-day-", dir=disk if disk.is_dir() else None) as folder:
        day = Day(Path(folder) / "data", devices)
        memory, of_sqlite = [], sqlite_memory()
        for hour in range(1, hours + 1):
            day.hour()
            memory.append(resident())
            if not options.json:
                print(
                    f"hour {hour}: {memory[-1]:.1f} MiB, of which SQLite {of_sqlite():.1f}, {day.check_ins} check-ins, "
                    f"{day.uploads} uploads",
                    flush=True,
                )
        grown, last = slope(memory), of_sqlite()
        day.close()
    if options.json:
        case = f"{hours} hours of {devices} devices"
        print_alone("server day", case, MiB=memory[-1], MiB_an_hour=grown)
        print_alone("server day", f"{case}, SQLite", MiB=last)
    else:
        kept = "kept" if grown <= MOST_SLOPE else "BROKEN"
        if hours < HOURS:
            kept = "not judged, as caches still fill"
        print(f"slope {grown:.3f} MiB an hour, bound {MOST_SLOPE}: {kept}")


class Day:
    """A server and its devices, whose clock this turns."""

    def __init__(self, folder: Path, devices: int) -> None:
        self.now = time.time()
        self.check_ins = self.uploads = 0
        # Wide enough for the steps of the clock.
        self._fleet = Fleet(
            folder, devices, session_seconds=86400.0, retry_after=POLL_SECONDS, check_in_window=3 * POLL_SECONDS,
            session_end=self.now + 40 * 86400.0, keep_versions=2, keep_days=0.01,
        )  # fmt: skip
        self._app = create_app(self._fleet.settings, clock=self._clock)
        self._services = Services.open(self._fleet.settings, clock=self._clock)
        self._coordinator = Coordinator(self._services)
        self._coordinator.recover()
        self._body = write_weights({"w.update": np.zeros(ENTRIES, np.float32)})
        self._due = {token: self.now + POLL_SECONDS * at / devices for at, token in enumerate(self._fleet.tokens)}
        self._create_task()

    def hour(self) -> None:
        """What happens in the next hour."""
        end = self.now + 3600
        while self.now < end:
            self.now += STEP_SECONDS
            for token in [token for token, due in self._due.items() if due <= self.now]:
                self._due[token] = self.now + self._check_in(token)
            for _ in range(20):
                if not self._coordinator.step():
                    break
        gc.collect()

    def close(self) -> None:
        for services in (self._services, self._app.extensions["archipel"], self._fleet.services):
            services.database.dispose()

    def _clock(self) -> float:
        return self.now

    def _create_task(self) -> None:
        uploaded = self._operator("/v1/bundles", self._fleet.bundle(ENTRIES).read_bytes())
        request = TaskRequest(
            name="day", population=POPULATION, rounds=10_000, cohort=COHORT, min_cohort=COHORT, privacy="plain",
            deadlines={"assigning": 3000.0, "updating": 3000.0},
            bundle=msgspec.json.decode(uploaded)["digest"],
        )  # fmt: skip
        self._operator("/v1/tasks", msgspec.json.encode(request))

    def _operator(self, path: str, body: bytes) -> bytes:
        kind = "application/zip" if path.endswith("bundles") else "application/json"
        return self._ask("POST", path, self._fleet.operator_token, body, {"Content-Type": kind}, (200, 201))

    def _check_in(self, token: str) -> float:
        """Check in, and upload if there is something to do. Returns the seconds until the next one."""
        answer = _ANSWER(self._ask("POST", "/v1/check-ins", token, b"{}", {"Content-Type": "application/json"}))
        self.check_ins += 1
        if answer.plan is not None:
            round_id = decode("plan", answer.plan.body, RoundPlan).round_id
            headers = {
                "Content-Type": "application/octet-stream", "Digest-SHA256": hashlib.sha256(self._body).hexdigest()
            }  # fmt: skip
            # Refused where it is too early, because others have not come yet. Then it comes again.
            answered = self._ask("PUT", f"/v1/rounds/{round_id}/update", token, self._body, headers, (200, 409, 410))
            self.uploads += b"title" not in answered
        return answer.retry_after

    def _ask(
        self,
        method: str,
        path: str,
        token: str,
        body: bytes,
        headers: dict[str, str],
        allowed: tuple[int, ...] = (200,),
    ) -> bytes:
        environ = EnvironBuilder(
            path=path, method=method, data=body, headers={"Authorization": f"Bearer {token}", **headers},
            environ_overrides={"REMOTE_ADDR": "127.0.0.1"},
        ).get_environ()  # fmt: skip
        chunks, status, _ = run_wsgi_app(self._app, environ)
        answer = b"".join(chunks)
        close = getattr(chunks, "close", None)
        if close is not None:
            close()
        if int(status[:3]) not in allowed:
            raise RuntimeError(f"{method} {path}: {status} {answer[:300]!r}")
        return answer


_ANSWER: Callable[[bytes], CheckInResponse] = msgspec.json.Decoder(CheckInResponse).decode


def resident() -> float:
    """MiB of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def sqlite_memory() -> Callable[[], float]:
    """A function that gives the MiB that SQLite has in this process; NaN where its library does not tell."""
    maps = Path("/proc/self/maps").read_text().split()
    found = next((word for word in maps if "libsqlite3" in word), _sqlite3.__file__)
    try:
        used = ctypes.CDLL(found).sqlite3_memory_used
    except AttributeError:
        return lambda: math.nan
    used.restype = ctypes.c_int64
    return lambda: float(used()) / 2**20


def slope(memory: list[float]) -> float:
    """MiB an hour over the second half of the hours: the least-squares line."""
    rest = memory[len(memory) // 2 :]
    return float(np.polyfit(np.arange(len(rest)), rest, 1)[0])


if __name__ == "__main__":
    main()
