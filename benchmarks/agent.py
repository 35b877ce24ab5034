"""The device agent beside Flower's client: what it costs to wait, to start, to train and to send.

    python benchmarks/agent.py --install-peers      once: environments of Flower with PyTorch and of the device install
    python benchmarks/agent.py                      everything, about 15 minutes
    python benchmarks/agent.py --quick              about a minute; without round, and bytes without Flower
    python benchmarks/agent.py --only idle          rows of one part: idle, start, bytes, epoch, round

Servers and clients are processes on this machine that speak HTTP over loopback. Flower is a SuperNode with a SuperLink,
both without TLS, as ours are here; ours is `archipel device run`.

| part | what |
|---|---|
| idle | per cent of one core of an agent that is told to come again after so many seconds; Flower's asks every 3 s |
| start | from starting the process to its first question for work at the server; CPU until then; memory 2 s later |
| bytes | sent and received by one device in a round, headers included, over the model's size in float32 |
| epoch | CPU seconds of a local epoch against a loop of ONNX Runtime over the same train graph |
| round | CPU seconds of the device in a whole plain round of one epoch, all its processes, waiting included |

Memory and CPU are of a client's processes together; RSS, PSS and USS as Linux tells them. Targets: idle below 60 MiB
(RSS) and 0.1%; an epoch at most 1.1 of the loop. Flower is left out where it is not installed.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from itertools import pairwise
from pathlib import Path

import numpy as np
from agent_federation import Federation, agents, device, flat_bundle, rounds
from agent_flower import FIRST_PULL, PEER, Flower, install_flower
from agent_process import Proxy, all_seconds, memory, proxy, running_seconds, wait_for
from agent_training import Network, epoch_rows
from lite_peers import DEFAULT_FOLDER, ROOT, PeerError, clean_environment, python_of
from lite_predict import say
from lite_process import device_environment
from measure import Report, Row, arguments

from archipel.bundle import generate_key
from archipel.client import Event

CHECK_IN = b"POST /v1/check-ins"
PARTS = ("idle", "start", "bytes", "epoch", "round")
SIZES = {"100 kB": 25_000, "1 MB": 250_000, "6.6 MB": 1_650_000}
COHORT = 5
NONE = float("nan")
"""Where there is no peer."""
Marks = list[tuple[int, int]]
"""What had been sent and received whenever a round was over."""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", action="append", choices=PARTS, help="only this part; can be repeated")
    parser.add_argument("--peers", type=Path, default=DEFAULT_FOLDER, help="folder of the environments")
    parser.add_argument("--install-peers", action="store_true", help="make the environments, and end")
    options = parser.parse_args()
    if options.install_peers:
        try:
            install_flower(options.peers)
            device_environment(options.peers)
        except PeerError as error:
            sys.exit(str(error))
        return
    report = Report(options.json, ("numpy", "onnxruntime", "cryptography", "msgspec"))
    with tempfile.TemporaryDirectory(prefix="archipel-agent-") as folder, ExitStack() as stack:
        flower = None
        try:
            flower = Flower(options.peers, Path(folder) / "flower")
            stack.enter_context(flower.serving())
        except PeerError as error:
            say(f"{PEER} is left out: {error}")
        bench = Bench(report, Path(folder), flower, options.peers, options.quick)
        for part in options.only or (PARTS[:-1] if options.quick else PARTS):
            report.add(getattr(bench, part)())


class Bench:
    """The parts; each makes a server of its own and gives rows."""

    def __init__(self, report: Report, folder: Path, flower: Flower | None, peers: Path, quick: bool) -> None:
        self.report, self.folder, self.flower, self.quick = report, folder, flower, quick
        try:
            python_of(peers, "device", "benchmarks/agent.py")
            self.python, self.environment = device_environment(peers), clean_environment()
        except PeerError as error:
            say(f"the agent runs in this environment: {error}")
            self.python, self.environment = Path(sys.executable), {**os.environ, "PYTHONPATH": str(ROOT)}

    def federation(self, name: str, retry_after: float) -> Federation:
        (self.folder / name).mkdir()
        return Federation(self.folder / name, retry_after)

    def row(self, case: str, ours: float, theirs: float, unit: str) -> Row:
        return Row("agent", case, ours, theirs, PEER, ours / theirs, unit)

    def idle(self) -> Iterator[Row]:
        """All wait at the same time, each behind a proxy that counts how often it asks."""
        waits, seconds = ((5.0,), 10.0) if self.quick else ((1.0, 2.0, 5.0, 30.0), 120.0)
        with ExitStack() as stack:
            running: dict[str, tuple[int, Proxy, bytes]] = {}
            for wait in waits:
                federation = self.federation(f"idle-{wait:.0f}", wait)
                stack.enter_context(federation.serving())
                passing = stack.enter_context(proxy(federation.port))
                pid = stack.enter_context(self.device(federation.enrolled("device"), passing.port))
                running[f"{wait:.0f} s"] = pid, passing, CHECK_IN
            if self.flower is not None:
                passing = stack.enter_context(proxy(self.flower.port))
                running[PEER] = stack.enter_context(self.flower.node(passing.port)), passing, FIRST_PULL
            for name, (_, passing, asks) in running.items():
                wait_for(lambda passing=passing, asks=asks: passing.arrivals(asks), f"{name}: the first question")
            time.sleep(3)
            before = {name: (running_seconds(pid), time.time()) for name, (pid, _, _) in running.items()}
            time.sleep(seconds)
            used, polls, found = {}, {}, {}
            for name, (pid, passing, asks) in running.items():
                cpu, since = before[name]
                used[name] = 100 * (running_seconds(pid) - cpu) / (time.time() - since)
                polls[name] = sum(when > since for when in passing.arrivals(asks))
                found[name] = memory(pid)
        for wait in waits:
            name = f"{wait:.0f} s"
            yield self.row(f"idle, asks each {name}", used[name], used.get(PEER, NONE), "%")
            each = {
                who: used[who] / 100 * seconds / max(polls[who], 1) * 1e3 for who in (name, *running.keys() & {PEER})
            }
            yield self.row(f"idle {name}, CPU a question", each[name], each.get(PEER, NONE), "ms")
        for kind, size in found[name].items():
            yield self.row(f"idle, {kind}", size, found.get(PEER, {}).get(kind, NONE), "MiB")

    def start(self) -> Iterator[Row]:
        federation = self.federation("start", 5.0)
        found: dict[str, list[dict[str, float]]] = {"ours": [], PEER: []}
        with federation.serving():
            folder = federation.enrolled("device")
            # The first of each, with cold file caches, does not count.
            for index in range(2 if self.quick else 8):
                ours = [started(federation.port, CHECK_IN, lambda port: self.device(folder, port))]
                theirs = [] if self.flower is None else [started(self.flower.port, FIRST_PULL, self.flower.node)]
                if index:
                    found["ours"] += ours
                    found[PEER] += theirs
        kinds = {"to first check-in": "s", "CPU": "s", "RSS": "MiB", "PSS": "MiB", "USS": "MiB"}
        for kind, unit in kinds.items():
            ours, theirs = (statistics.median([each[kind] for each in ones] or [NONE]) for ones in found.values())
            yield self.row(f"start, {kind}", ours, theirs, unit)

    def bytes(self) -> Iterator[Row]:
        """Agents are threads of this process; one is behind the proxy. What trains changes every entry a little."""
        count = 2 if self.quick else 5
        sizes = {"100 kB": SIZES["100 kB"]} if self.quick else SIZES
        federation = self.federation("bytes", 0.2)
        with federation.serving() as operator:
            for size, entries in sizes.items():
                bundle = flat_bundle(self.folder / f"flat-{entries}", entries, federation.publisher)
                peer = {} if self.flower is None or self.quick else self.flower_bytes(entries, count)
                for privacy in ("secure", "plain"):
                    # New ones, that have fetched nothing yet, in a population without those that are gone.
                    name = f"{privacy}-{entries}"
                    folders = [federation.enrolled(f"{name}-{index}", name) for index in range(COHORT)]
                    marks: Marks = []
                    with proxy(federation.port) as passing:
                        servers = dict.fromkeys(folders, federation.url)
                        servers[folders[0]] = f"http://127.0.0.1:{passing.port}"

                        watched = federation.ids[folders[0]]

                        def on_event(
                            event: Event, passing: Proxy = passing, marks: Marks = marks, watched: str = watched
                        ) -> None:
                            if event.name == "committed" and event.device_id == watched:
                                marks.append(passing.bytes)

                        with agents(servers, {"x": np.full(8, 0.01, np.float32)}, on_event):
                            wait_for(lambda passing=passing: passing.arrivals(CHECK_IN), "the agent")
                            marks.append(passing.bytes)
                            rounds(operator, bundle, COHORT, count, privacy, name)()
                            wait_for(lambda marks=marks: len(marks) > count, "the last round's end at the device")
                    yield from self.byte_rows(f"{privacy} {size}", taken(marks), peer, 4 * entries)

    def byte_rows(self, case: str, ours: dict[str, float], peer: dict[str, float], model: int) -> Iterator[Row]:
        for kind, size in ours.items():
            yield self.row(f"{case}, {kind}", size / model, peer.get(kind, NONE) / model, "x")

    def flower_bytes(self, entries: int, count: int) -> dict[str, float]:
        assert self.flower is not None
        with proxy(self.flower.port) as passing, self.flower.node(passing.port):
            wait_for(lambda: passing.arrivals(FIRST_PULL), "the SuperNode")
            marks = [passing.bytes]
            ended = [mark["time"] for mark in self.flower.run(count, entries) if "round" in mark]
            marks += [passing.until(when) for when in ended]
        return taken(marks)

    def epoch(self) -> Iterator[Row]:
        for network in self.networks("epoch"):
            yield from epoch_rows(network, 3 if self.quick else 9)

    def round(self) -> Iterator[Row]:
        """The other device that a round needs has one batch, and is a thread of this process."""
        count, repeats = (1, 1) if self.quick else (3, 3)
        federation = self.federation("round", 0.5)
        with federation.serving() as operator:
            folders = [federation.enrolled(f"device-{index}") for index in range(2)]
            for network in self.networks("round", federation.publisher):
                used: dict[str, list[float]] = {"ours": [], PEER: [], "epoch": []}
                data = str(network.data())
                few = {name: array[:32] for name, array in network.fields.items()}
                for _ in range(repeats):
                    with ExitStack() as stack:
                        stack.enter_context(agents({folders[1]: federation.url}, few))
                        passing = stack.enter_context(proxy(federation.port))
                        pid = stack.enter_context(self.device(folders[0], passing.port, data))
                        wait_for(lambda passing=passing: passing.arrivals(CHECK_IN), "the agent")
                        ended = rounds(operator, network.file, 2, count, "plain")
                        used["ours"].append(seconds_of(pid, ended) / count)
                    if self.flower is not None:
                        cpu, epoch = self.flower_round(network, count)
                        used[PEER].append(cpu)
                        used["epoch"].append(epoch)
                ours, theirs, epoch = (statistics.median(values or [NONE]) for values in used.values())
                yield self.row(f"{network.name} round", ours, theirs, "s")
                yield self.row(f"{network.name} round to epoch alone", ours, epoch, "s")

    def flower_round(self, network: Network, count: int) -> tuple[float, float]:
        """CPU seconds of the SuperNode and what it started, a round, and of the epoch alone within it."""
        assert self.flower is not None
        flower, marks = self.flower, []
        with proxy(flower.port) as passing, flower.node(passing.port) as pid:
            wait_for(lambda: passing.arrivals(FIRST_PULL), "the SuperNode")
            time.sleep(2)
            cpu = seconds_of(pid, lambda: marks.extend(flower.run(count, 0, network.make, str(network.pairs()))))
        return cpu / count, statistics.median(mark["cpu"] for mark in marks if "cpu" in mark)

    def networks(self, part: str, key: object = None) -> Iterator[Network]:
        for make in ("cnn_1d",) if self.quick else ("mlp", "cnn_1d"):
            folder = self.folder / f"{part}-{make}"
            folder.mkdir()
            yield Network(make, folder, 1024 if self.quick else 4096, key or generate_key())

    def device(self, folder: Path, port: int, data: str = "") -> AbstractContextManager[int]:
        """The agent's process at the server behind that port; its id."""
        return device(self.python, self.environment, folder, f"http://127.0.0.1:{port}", data)


def started(port: int, asks: bytes, process: Callable[[int], AbstractContextManager[int]]) -> dict[str, float]:
    """From the start of a process, which is given the port to ask at, to what begins with `asks`."""
    with proxy(port) as passing:
        began = time.time()
        with process(passing.port) as pid:
            wait_for(lambda: passing.arrivals(asks), "the first question for work")
            cpu = running_seconds(pid)
            time.sleep(2)
            return {"to first check-in": passing.arrivals(asks)[0] - began, "CPU": cpu, **memory(pid)}


def taken(marks: Marks) -> dict[str, float]:
    """Bytes of the first round and of a later one (median)."""
    sums = [tuple(b - a for a, b in zip(*each)) for each in pairwise(marks)]
    later = sums[1:]
    return {
        "first round": float(sum(sums[0])),
        "a later round": statistics.median(map(sum, later)),
        "of it sent": statistics.median(up for up, _ in later),
    }


def seconds_of(pid: int, work: Callable[[], object]) -> float:
    before = all_seconds(pid)
    work()
    time.sleep(1)
    return all_seconds(pid) - before


if __name__ == "__main__":
    main()
