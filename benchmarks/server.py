"""The federation server under load, against a bare Flask handler that streams the body to disk.

Both run under gunicorn with one worker of 16 threads, on this machine beside the clients, and sync a body to disk
before they answer; ours also checks it, keeps it under its digest and commits a row. The uploads of both take turns.

| case | what |
|---|---|
| masked, plain | updates a second of a round with privacy secure or plain, 16 devices at once |
| MB/s | the same, in megabytes |
| at once | updates of 100 kB a second with so many devices at the same time |
| memory | MiB of all processes of the server (PSS) after the uploads |
| check-in | p50 and p99 (ms), processor time of one in the server and in this process (ms), and how many a second, |
| | while 10,000 devices come every 30 s, and while 100,000 come at random times, as many in all (PostgreSQL). Beside |
| | it an empty WSGI application: what gunicorn, the network and the devices here take by themselves |

Targets: at least 0.6 of the bare handler's updates a second; p99 of check-ins below 20 ms. --database postgresql needs
scripts/install_postgres.sh.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from measure import Report, Row, arguments
from server_load import POPULATION, THREADS, Fleet, bare, check_in, memory, upload
from server_polling import AT_RANDOM, QUICK, STEADY, measure_polling
from sqlalchemy import insert, select

from archipel.bundle import write_weights
from archipel.operator import OperatorClient, TaskRequest
from archipel.server.database.tables import Answer, Participant

PEER = "bare Flask"
LARGE, SMALL = 1_650_000, 25_000
"""Entries of an update: 6.6 MB and 100 kB of float32; masked, 3 bytes each."""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--database", choices=("sqlite", "postgresql", "both"), default="sqlite")
    parser.add_argument("--only", choices=("uploads", "check-ins"), help="one half of the cases")
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: the system's temporary folder)")
    options = parser.parse_args()
    report = Report(options.json, ("flask", "gunicorn", "sqlalchemy", "cryptography", "numpy"))
    chosen = ("sqlite", "postgresql") if options.database == "both" else (options.database,)
    for database in chosen:
        if options.only != "check-ins":
            with ExitStack() as stack:
                uploads(report, options, database, stack)
        if options.only != "uploads":
            check_ins(report, options, database)


def uploads(report: Report, options: argparse.Namespace, database: str, stack: ExitStack) -> None:
    """The cases of updates, and the memory after them."""
    root = stack.enter_context(folder(options))
    url = stack.enter_context(database_url(database))
    # No pace steering here: what it does to check-ins is measured by itself.
    fleet = Fleet(root / "data", 1024, database=url, threads=THREADS, retry_after=0.05, check_in_window=60.0)
    host, port, pid = stack.enter_context(fleet.serving())
    peer = stack.enter_context(bare(root / "bare"))
    client = stack.enter_context(OperatorClient(f"http://{host}:{port}", fleet.operator_token))
    bench = Bench(report, fleet, client, (host, port), peer[:2], database, 2 if options.quick else 7)
    if not options.quick:
        bench.uploads("masked", LARGE, 64, THREADS)
        bench.uploads("plain", LARGE, 64, THREADS)
        memory_row(report, database, pid, peer[2])
    bench.uploads("masked", SMALL, 64, THREADS)
    bench.uploads("plain", SMALL, 64, THREADS)
    for at_once in (10,) if options.quick else (10, 100, 1000):
        bench.uploads("masked", SMALL, max(64, at_once), at_once, f"{at_once} at once")


def check_ins(report: Report, options: argparse.Namespace, database: str) -> None:
    """The cases of devices that poll. Each has a database of its own."""
    cases = [QUICK] if options.quick else [STEADY, *([AT_RANDOM] if database == "postgresql" else [])]
    for case in cases:
        with folder(options) as root, database_url(database) as url:
            measure_polling(report, case, root, database, url)


@contextmanager
def folder(options: argparse.Namespace) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="archipel-load-") as name:
        yield Path(name)


def memory_row(report: Report, database: str, ours: int, theirs: int) -> None:
    a, b = memory(ours), memory(theirs)
    report.add([Row("server", f"memory, {database}", a, b, PEER, a / b, "MiB")])


class Bench:
    """One server and its peer. Every round's task is made, filled and thrown away."""

    def __init__(
        self,
        report: Report,
        fleet: Fleet,
        client: OperatorClient,
        ours: tuple[str, int],
        theirs: tuple[str, int],
        database: str,
        rounds: int,
    ) -> None:
        self.report, self.fleet, self.client = report, fleet, client
        self.ours, self.theirs, self.database, self.rounds = ours, theirs, database, rounds
        self._bundles: dict[int, str] = {}

    def uploads(self, privacy: str, entries: int, devices: int, at_once: int, label: str = "") -> None:
        plain = privacy == "plain"
        # 16 bits an entry; the modulus also holds the sum of so many.
        width = 3 if devices <= 256 else 4
        body = write_weights({"w.update": np.zeros(entries, np.float32)}) if plain else bytes(width * entries)
        rates: dict[str, list[float]] = {"ours": [], "peer": []}
        for _ in range(self.rounds):
            with self.round(privacy, entries, devices) as (path, tokens):
                headers = [(path, {"Authorization": f"Bearer {token}"}) for token in tokens]
                rates["ours"].append(devices / upload(*self.ours, headers, body, at_once))
            peers = [("/update", {})] * devices
            rates["peer"].append(devices / upload(*self.theirs, peers, body, at_once))
        a, b = (statistics.median(rates[name]) for name in ("ours", "peer"))
        ratio = statistics.median(x / y for x, y in zip(rates["ours"], rates["peer"]))
        size = len(body) / 1e6
        case = f"{privacy} {size:.3g} MB, {label or self.database}"
        self.report.add([Row("server", case, a, b, PEER, ratio, "1/s")])
        if not label:
            self.report.add([Row("server", f"{case}, volume", a * size, b * size, PEER, ratio, "MB/s")])

    @contextmanager
    def round(self, privacy: str, entries: int, devices: int) -> Iterator[tuple[str, list[str]]]:
        """A round that takes updates, and the tokens of its devices. What comes before is not measured: of a secure
        round the first messages are put into the database."""
        if entries not in self._bundles:
            self._bundles[entries] = self.client.bundles.upload(self.fleet.bundle(entries)).digest
        tokens = self.fleet.tokens[:devices]
        deadlines = dict.fromkeys(("assigning", "advertising", "sharing", "complaining", "masking", "updating"), 600.0)
        task = self.client.tasks.create(
            TaskRequest(
                name="load", population=POPULATION, bundle=self._bundles[entries], rounds=1, cohort=devices,
                min_cohort=devices, privacy="secure" if privacy == "masked" else "plain", deadlines=deadlines,
            )  # type: ignore[arg-type]
        )  # fmt: skip
        try:
            check_in(*self.ours, tokens)
            found = self._wait(task.task_id, "advertising" if privacy == "masked" else "updating")
            if privacy == "masked":
                for phase in ("advertising", "sharing", "complaining"):
                    self._answer_all(found, phase)
                self._wait(task.task_id, "masking")
            yield f"/v1/rounds/{found}/update", tokens
        finally:
            self.client.tasks.cancel(task.task_id)
            wait_for(lambda: all(each.ended for each in self.client.tasks.rounds(task.task_id)))

    def _wait(self, task_id: str, phase: str) -> str:
        """The id of the task's round, once it is in that phase."""
        found: list[str] = []

        def reached() -> bool:
            found[:] = [each.round_id for each in self.client.tasks.rounds(task_id) if each.phase == phase]
            return bool(found)

        wait_for(reached)
        return found[0]

    def _answer_all(self, round_id: str, phase: str) -> None:
        with self.fleet.services.database.write() as session:
            members = session.scalars(select(Participant.device_id).where(Participant.round_id == round_id))
            rows = [
                {
                    "round_id": round_id, "phase": phase, "device_id": device, "digest": "0" * 64, "size": 0,
                    "body": None, "received": time.time(),
                }
                for device in members
            ]  # fmt: skip
            session.execute(insert(Answer), rows)


@contextmanager
def database_url(kind: str) -> Iterator[str]:
    if kind == "sqlite":
        yield ""
        return
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.support.cluster import Cluster

    cluster = Cluster()
    cluster.start()
    try:
        yield cluster.url("postgres")
    finally:
        cluster.stop()


def wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the server did not get there")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
