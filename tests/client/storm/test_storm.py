"""50 agents behind a network that loses, cuts, delays, doubles and invents; they and the server are killed at random.

In the end every sum is right, no device has sent two different things for one round, and nobody is stuck.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from archipel import bundle as b
from archipel.client.memory.entry import Entry
from archipel.operator import OperatorClient, TaskRequest
from archipel.protocol.sealed import encode, public_bytes
from archipel.server import init_data_folder, load_settings
from archipel.server.services import Services
from archipel.server.settings import Settings
from tests.client.storm import fleet
from tests.client.storm.fleet import CALM, Berth, Ship
from tests.client.storm.reckoning import Reckoning, journal
from tests.client.storm.weather import Weather
from tests.support.faults import Proxy, running
from tests.support.federation import Federation
from tests.support.linear_bundle import POPULATION, make_bundle
from tests.support.serving import SERVE, Server

T = TypeVar("T")
AGENTS = 50
PER_SHIP = (17, 15, 3, 3, 3, 3, 3, 3)
"""Agents in each process; those with few of them are killed."""
ISOLATED = 3
"""So many agents compute in a process of their own."""
SHORT, LONG = 10.0, 600.0
DEADLINES = dict.fromkeys(
    (
        "assigning",
        "advertising",
        "sharing",
        "complaining",
        "masking",
        "confirming",
        "unmasking",
        "updating",
        "buffering",
    ),
    6.0,
)
TASKS: dict[str, dict[str, Any]] = {
    "secure": {"cohort": 6, "threshold": 4},
    # Devices see the versions that are made while they work at different times, so what each of them multiplied its
    # update with is known to it alone; without that exponent the sum can be computed again.
    "overlapping": {
        "mode": "asynchronous", "cohort": 4, "threshold": 3, "concurrency": 12, "staleness_exponent": 0.0,
    },
    "plain": {"privacy": "plain", "cohort": 5},
    "buffered": {"privacy": "plain", "mode": "asynchronous", "cohort": 5, "concurrency": 10},
    "evaluation": {"kind": "evaluation", "metrics": {"mse": 4096.0}, "max_examples": 100, "cohort": 4, "rounds": 256},
}  # fmt: skip


class Processes(Server):
    """Supervisor, gunicorn and coordinator on one port over all restarts."""

    settings: Settings
    port = 0

    def begin(self) -> None:
        environment = os.environ | {
            f"ARCHIPEL_SERVER_{name}": value
            for name, value in {
                "RETRY_AFTER": "0.4", "CHECK_IN_WINDOW": "5", "LEASE_SECONDS": "2", "MAX_FAILED_ROUNDS": "1000",
                "ANONYMOUS_PER_SECOND": "200", "CONCURRENT_REQUESTS": "15",
            }.items()
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(self.folder), str(self.port)],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        )  # fmt: skip
        line = self.process.stdout.readline()
        assert line, (self.folder / "server.log").read_text()[-3000:]
        self.port = int(line.rsplit(":", 1)[1])

    def kill(self, what: str) -> None:
        """SIGKILL. A supervisor's children die with it, and another one is started."""
        if what == "supervisor":
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()
            deadline = time.monotonic() + 20
            while self.children() and time.monotonic() < deadline:
                time.sleep(0.05)
            self.begin()
        elif (found := self.children().get(what)) is not None:
            with suppress(ProcessLookupError):
                os.kill(found, signal.SIGKILL)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30)
        self.process.stdout.close()


def least_starts(seconds: float) -> float:
    """Of the agents' processes: so many more than there are belong to a storm of that length."""
    return len(PER_SHIP) + seconds / 10


class Storm:
    """Everything, with one generator for what happens to it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.folder = folder
        fleet.prepare()
        enrolment, publisher = b.generate_key(), b.generate_key()
        token = init_data_folder(
            folder / "server", enrolment_key=public_bytes(enrolment), publisher_keys=[public_bytes(publisher)]
        )
        server: Any = Processes(folder / "server")
        self.stack = ExitStack()
        server.begin()
        self.stack.callback(server.close)
        server.settings = load_settings(folder / "server", environment={})
        self.server = server
        self.operator = self.stack.enter_context(OperatorClient(f"http://127.0.0.1:{server.port}", token))
        file = make_bundle(folder / "linear", publisher, modes=("secure", "plain"), queries=256, query_days=1)
        self.federation = Federation(folder, server, self.operator, enrolment, publisher, file)
        self.bundle = self.federation.publish()
        self.proxy = self.stack.enter_context(running(Proxy(server.port)))
        self.weather = Weather(self.proxy, random.Random(seed + 1))
        berths = iter([self.berth(number) for number in range(AGENTS)])
        self.ships = []
        for number, size in enumerate(PER_SHIP):
            self.ships.append(Ship(folder, [next(berths) for _ in range(size)], seed + 100 * number))
            self.stack.callback(self.ships[-1].close)

    def berth(self, number: int) -> Berth:
        config = {
            "folder": self.agent_folder(number), "server": f"{self.proxy.url}/agent-{number}", "allow_plain": True,
            "connect_timeout": 2.0, "read_timeout": 2.0, "request_timeout": 4.0, "attempts": 4, "backoff": 0.05,
            "max_wait": 1.0, "patience": 8.0, "pause_seconds": 0.3, "max_offline_wait": 1.0, "resume_within": 2.0,
            "isolated": number >= AGENTS - ISOLATED,
        }  # fmt: skip
        return Berth(number, config, encode(self.federation.token(not_after=int(time.time()) + 86400)))

    def agent_folder(self, number: int) -> Path:
        return self.folder / f"agent-{number}"

    def task(self, **changes: Any) -> str:
        request = TaskRequest(
            **{
                "name": "linear", "population": POPULATION, "bundle": self.bundle, "rounds": 1_000_000,
                "min_cohort": 3, "deadlines": {**DEADLINES, "aggregating": 20.0}, **changes,
            }
        )  # fmt: skip
        return self.operator.tasks.create(request).task_id

    def rage(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        killed = time.monotonic()
        # Where a process takes seconds to start, the storm goes on until enough of them were killed.
        while time.monotonic() < deadline or sum(ship.starts for ship in self.ships) <= least_starts(seconds):
            self.weather.change()
            time.sleep(self.rng.uniform(0.3, 1.5))
            for ship in self.ships:
                ship.check()
            happens = self.rng.random()
            # By chance alone a short storm may kill nobody.
            if happens < 0.4 or time.monotonic() - killed > 2:
                killed = time.monotonic()
                ship = self.rng.choice(self.ships[2:])
                ship.kill()
                time.sleep(self.rng.uniform(0.0, 0.5))
                ship.start()
            elif happens < 0.5:
                self.server.kill(self.rng.choice(["worker", "coordinator", "coordinator", "gunicorn", "supervisor"]))

    def calm(self) -> None:
        self.weather.calm()
        (self.folder / CALM).touch()

    def answered(self, ask: Callable[[], T]) -> T:
        """`ask` of the operator, again until the server is there."""
        deadline = time.monotonic() + 60
        while True:
            try:
                return ask()
            except Exception:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def committed(self, task: str) -> int:
        """Rounds of the task, once the server answers."""
        return int(self.answered(lambda: self.operator.tasks.get(task)).rounds_committed)

    def shown(self) -> object:
        """What the server says about rounds that are not over."""
        live = [
            info
            for task in self.operator.tasks.list()
            for info in self.operator.tasks.rounds(task.task_id)
            if info.phase not in ("committed", "failed")
        ]
        waiting = {task.name: (task.waiting, task.waiting_for) for task in self.operator.tasks.list() if not task.ended}
        rows = [(info.phase, info.reason, [each.furthest for each in info.participants]) for info in live]
        return waiting, rows

    def unsettled(self) -> list[int | tuple[int, Entry]]:
        """What is not over: agents that are not enrolled, and rounds that are not closed."""
        found: list[int | tuple[int, Entry]] = []
        for number in range(AGENTS):
            folder = self.agent_folder(number)
            if not (folder / "device.json").exists():
                found.append(number)
            found += [(number, entry) for entry in journal(folder) if entry.step != "closed"]
        return found

    def wait_until(self, what: Callable[[], object], seconds: float, why: Callable[[], object]) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            for ship in self.ships:
                ship.check()
            assert time.monotonic() < deadline, why()
            time.sleep(0.1)

    def reckoning(self) -> Reckoning:
        services = Services.open(self.server.settings)
        self.stack.callback(services.database.dispose)
        numbers = {}
        for number in range(AGENTS):
            record = b"".join((self.agent_folder(number) / "device.json").read_bytes().split())
            numbers[record.split(b'"device_id":"')[1][:32].decode()] = number
        folders = {device: self.agent_folder(number) for device, number in numbers.items()}
        return Reckoning(
            services, self.folder / "linear", public_bytes(self.federation.publisher_key), folders, numbers,
            {device: journal(folder) for device, folder in folders.items()},
        )  # fmt: skip


@pytest.fixture
def storm(tmp_path: Path) -> Iterator[Storm]:
    seed = int(os.environ.get("STORM_SEED", random.SystemRandom().randrange(10**6)))
    print(f"STORM_SEED={seed}")
    made = Storm(tmp_path, seed)
    try:
        yield made
    finally:
        made.stack.close()


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("seconds", [SHORT, pytest.param(LONG, marks=pytest.mark.slow)])
def test_whatever_happens_sums_are_right_and_nobody_is_stuck(storm: Storm, seconds: float) -> None:
    tasks = {name: storm.task(name=name, **values) for name, values in TASKS.items()}
    storm.rage(seconds)
    storm.calm()
    # Left alone, every task goes on; the evaluations may have used up what a population may be asked.
    going = [task for task in tasks.values() if storm.operator.tasks.get(task).state == "running"]
    assert set(tasks.values()) - set(going) <= {tasks["evaluation"]}
    goals = {task: storm.committed(task) + 1 for task in going}
    storm.wait_until(lambda: all(storm.committed(task) >= goal for task, goal in goals.items()), 60, storm.shown)
    for task in goals:
        storm.operator.tasks.cancel(task)
    storm.wait_until(lambda: not storm.unsettled(), 30, storm.unsettled)
    last = storm.task(name="all", rounds=1, cohort=AGENTS, min_cohort=AGENTS, threshold=35)
    storm.wait_until(lambda: storm.committed(last), 60, storm.shown)
    storm.wait_until(lambda: not storm.unsettled(), 30, storm.unsettled)
    errors = [error for ship in storm.ships for error in ship.stop()]
    assert not errors, errors
    found = storm.reckoning()
    print(storm.weather.made, [ship.starts for ship in storm.ships], len(storm.proxy.came), "requests")
    print({name: sum(each.task_id == task for each in found.committed) for name, task in tasks.items()})
    found.check_sums()
    found.check_uploads(storm.proxy)
    found.check_journals()
    found.check_states()
    # It was a storm.
    assert sum(storm.weather.made.values()) > 5 * seconds
    assert sum(ship.starts for ship in storm.ships) > least_starts(seconds)
    [end] = [each for each in found.committed if each.task_id == last]
    for device, entries in found.journals.items():
        assert [entry.result for entry in entries if entry.round_id == end.round_id] == ["took_part"], device
