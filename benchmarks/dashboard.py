"""What open pages of the dashboard cost devices: uploads a second with and without 500 of them.

Two servers on this machine, the same but for the pages, take the uploads of one round after the other in turns. Each
page is a connection that reads the events of a task, as a browser does; 16 of each of many tokens.

| case | what |
|---|---|
| idle pages | the pages watch a task in which nothing happens |
| of the round | the pages watch the task whose updates are uploaded, and are sent each change |
| memory | MiB of all processes of the server (PSS) after the uploads |
| processor | percent of one core that all processes of the server take while nothing happens |

Target: 500 idle pages cost less than a tenth of the uploads a second.
"""

from __future__ import annotations

import http.client
import selectors
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
from measure import Report, Row, arguments
from server import Bench
from server_load import POPULATION, THREADS, Fleet, memory, processor, upload

from archipel.bundle import write_weights
from archipel.operator import OperatorClient, TaskRequest
from archipel.protocol.operator.access import TokenRequest
from archipel.server.dashboard.live.hub import LOOK_SECONDS, OF_ONE_PERSON

PEER = "no pages"
PAGES = 500
LARGE, SMALL, IDLE = 1_650_000, 25_000, 100
"""Entries of an update: 6.6 MB and 100 kB of float32; that of the task in which nothing happens."""
DEVICES = 64


def main() -> None:
    options = arguments(__doc__).parse_args()
    report = Report(options.json, ("flask", "gunicorn", "sqlalchemy", "numpy"))
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="archipel-pages-")))
        sides = {name: stack.enter_context(Side(root / name, report).serving()) for name in ("ours", "peer")}
        rounds = 4 if options.quick else 11
        pages = Pages(sides["ours"], 64 if options.quick else PAGES)
        for entries in (SMALL,) if options.quick else (SMALL, LARGE):
            with pages.watching(sides["ours"].idle_task()):
                compare(report, sides, entries, rounds, f"{pages.number} idle pages")
        compare(report, sides, SMALL, rounds, f"{pages.number} pages of the round", pages)
        with pages.watching(sides["ours"].idle_task()):
            a, b = memory(sides["ours"].pid), memory(sides["peer"].pid)
            report.add([Row("dashboard", f"memory, {pages.number} idle pages", a, b, PEER, a / b, "MiB")])
            a, b = processor_share([sides["ours"].pid, sides["peer"].pid], 5.0 if options.quick else 40.0)
        report.add([Row("dashboard", f"processor, {pages.number} idle pages", a, b, PEER, a / b, "%")])


def processor_share(pids: Sequence[int], seconds: float) -> list[float]:
    """Percent of one core that each process takes with its descendants while nobody asks anything else."""

    def spent() -> list[float]:
        return [processor(pid) for pid in pids]

    before, began = spent(), time.perf_counter()
    time.sleep(seconds)
    took = time.perf_counter() - began
    return [100 * (b - a) / took for a, b in zip(before, spent())]


class Side:
    """One of the two servers."""

    def __init__(self, folder: Path, report: Report) -> None:
        self.fleet = Fleet(folder, DEVICES, threads=THREADS, retry_after=0.05, check_in_window=60.0)
        self.report, self._bundle = report, ""
        self.address, self.pid = ("", 0), 0
        self.client: OperatorClient
        self.bench: Bench

    @contextmanager
    def serving(self) -> Iterator[Side]:
        with self.fleet.serving() as (host, port, pid):
            self.address, self.pid = (host, port), pid
            with OperatorClient(f"http://{host}:{port}", self.fleet.operator_token) as self.client:
                # Of the other benchmark only how it makes a round that takes updates.
                self.bench = Bench(self.report, self.fleet, self.client, self.address, self.address, "sqlite", 1)
                yield self

    def idle_task(self) -> str:
        """A task of a population without devices."""
        if not self._bundle:
            self._bundle = self.client.bundles.upload(self.fleet.bundle(IDLE)).digest
        request = TaskRequest(
            name="idle", population=f"not-{POPULATION}", bundle=self._bundle, rounds=1, min_cohort=2, cohort=2
        )
        return self.client.tasks.create(request).task_id

    def rate(self, entries: int, pages: Pages | None = None) -> float:
        """Uploads a second of one round, 16 at once."""
        body = write_weights({"w.update": np.zeros(entries, np.float32)})
        with self.bench.round("plain", entries, DEVICES) as (path, tokens), ExitStack() as stack:
            if pages is not None:
                newest = next(iter(self.client.tasks.list(state="running", population=POPULATION)))
                stack.enter_context(pages.watching(newest.task_id))
            headers = [(path, {"Authorization": f"Bearer {token}"}) for token in tokens]
            return DEVICES / upload(*self.address, headers, body, THREADS)


def compare(
    report: Report, sides: dict[str, Side], entries: int, rounds: int, case: str, pages: Pages | None = None
) -> None:
    rates: dict[str, list[float]] = {"ours": [], "peer": []}
    for turn in range(rounds):
        # Each is first in half of the turns.
        for name in sorted(sides, reverse=bool(turn % 2)):
            rates[name].append(sides[name].rate(entries, pages if name == "ours" else None))
    a, b = (statistics.median(rates[name][1:]) for name in ("ours", "peer"))
    # The first turn fills caches.
    ratio = statistics.median(x / y for x, y in zip(rates["ours"][1:], rates["peer"][1:]))
    report.add([Row("dashboard", f"plain {4 * entries / 1e6:.3g} MB, {case}", a, b, PEER, ratio, "1/s")])


class Pages:
    """So many open pages of one server, each logged in with one of many tokens. What they are sent is thrown away."""

    def __init__(self, side: Side, number: int) -> None:
        self.number, self._address = number, side.address
        tokens = [
            side.client.tokens.create(TokenRequest(name=f"reader-{place}", role="auditor")).token
            for place in range(-(-number // OF_ONE_PERSON))
        ]
        self._cookies = [self._log_in(token) for token in tokens]

    @contextmanager
    def watching(self, task: str) -> Iterator[None]:
        """All pages show the task meanwhile."""
        selector, done = selectors.DefaultSelector(), threading.Event()
        lines = [self._open(self._cookies[place // OF_ONE_PERSON], task) for place in range(self.number)]
        for line in lines:
            line.setblocking(False)
            selector.register(line, selectors.EVENT_READ)

        def read() -> None:
            while not done.is_set():
                for key, _ in selector.select(0.5):
                    if not key.fileobj.recv(1 << 16):  # type: ignore[union-attr]
                        raise RuntimeError("the server has closed a page")

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield
        finally:
            done.set()
            reader.join()
            for line in lines:
                line.close()
            # Until the server has found out, and has places for them again.
            time.sleep(4 * LOOK_SECONDS)

    def _log_in(self, token: str) -> str:
        host, port = self._address
        line = http.client.HTTPConnection(host, port)
        headers = {"Content-Type": "application/x-www-form-urlencoded", "Origin": f"http://{host}:{port}"}
        line.request("POST", "/dashboard/login", urlencode({"token": token}), headers)
        answer = line.getresponse()
        cookie = answer.headers.get("Set-Cookie", "")
        line.close()
        if answer.status != 303 or not cookie:
            raise RuntimeError(f"the dashboard's login answered {answer.status}")
        return cookie.partition(";")[0]

    def _open(self, cookie: str, task: str) -> socket.socket:
        line = socket.create_connection(self._address)
        host, port = self._address
        request = f"GET /dashboard/tasks/{task}/events HTTP/1.1\r\nHost: {host}:{port}\r\nCookie: {cookie}\r\n\r\n"
        line.sendall(request.encode())
        head = line.recv(1 << 16)
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"a page was refused: {head[:200]!r}")
        return line


if __name__ == "__main__":
    main()
