"""Parts of rounds are handed out to workers, and come back as the same sums, also where workers are lost."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipel.bundle import Bundle
from archipel.errors import MissingExtraError, SimulationError
from archipel.simulation import ListedClients, simulate
from archipel.simulation.choosing import AT_ONCE, ONE_BY_ONE
from archipel.simulation.crews.worker import (
    HAND_OVER,
    SplitFiles,
    Way,
    Worker,
    WorkerLost,
    WorkerSettings,
    start_workers,
)
from archipel.simulation.lanes import Lanes
from archipel.simulation.one_by_one import OneByOne
from archipel.simulation.rounds import Rounds, RoundSettings
from archipel.simulation.work import Work
from archipel.simulation.workers import Workers
from tests.support import simulation as reference

Make = Callable[..., Bundle]
Loses = Callable[[int, Any], bool]
CLIENTS = 21


class HereAndThere:
    """Workers in this process, each of which is lost where `loses` says so of its number and the message."""

    count, way = 3, Way(False)

    def __init__(self, settings: WorkerSettings, loses: Loses) -> None:
        self._settings, self._loses = settings, loses
        self._workers: list[Worker | None] = [Worker(settings) for _ in range(self.count)]
        self._answers: dict[int, Any] = {}
        self._work: Work | None = None
        self.sent: list[Any] = []

    def announce(self, work: Work) -> None:
        self._work = work
        for worker in self._workers:
            assert worker is not None
            worker.begin(work)

    def send(self, worker: int, message: Any) -> None:
        self.sent.append(message)
        if self._loses(worker, message):
            self._workers[worker] = None
            return
        there = self._workers[worker]
        assert there is not None
        self._answers[worker] = there.answer(message)

    def wait(self, workers: Collection[int]) -> list[int]:
        return sorted(workers)[-2:]

    def receive(self, worker: int, what: str) -> Any:
        if self._workers[worker] is None:
            raise WorkerLost(f"worker {worker} was lost at {what}")
        return self._answers.pop(worker)

    def replace(self, worker: int) -> None:
        assert self._work is not None
        there = self._workers[worker] = Worker(self._settings)
        there.begin(self._work)
        self._answers[worker] = there.way

    def close(self) -> None:
        pass


def clients() -> ListedClients:
    """Each of another size, the largest somewhere in the middle."""
    rng = np.random.default_rng(0)
    return ListedClients(
        [
            {"input": rng.standard_normal((size, 6), np.float32), "label": rng.integers(0, reference.CLASSES, size)}
            for size in rng.permutation(np.arange(3, 3 + CLIENTS))
        ]
    )


def rounds_of(bundle: Bundle, folder: Path, loses: Loses, privacy: str) -> tuple[Rounds, HereAndThere]:
    settings = RoundSettings(cohort=CLIENTS, privacy=privacy)
    given = WorkerSettings(bundle.folder, bundle.publisher, clients(), folder, False, 1, "cpu")
    crew = HereAndThere(given, loses)
    engine, rounds = Workers(crew, clients(), client_axis=False), Rounds(bundle, CLIENTS, settings, None, clients())
    for _ in range(2):
        _, reports = rounds.run(engine, 0)
        assert len(reports) == CLIENTS
    return rounds, crew


def once(wanted: Callable[[Any], bool]) -> Loses:
    """Whoever gets the first such message is lost."""
    happened = []

    def loses(worker: int, message: Any) -> bool:
        if happened or not wanted(message):
            return False
        happened.append(worker)
        return True

    return loses


@pytest.mark.parametrize("privacy", ["secure", "plain"])
@pytest.mark.sampled(every=4)
def test_lost_workers_change_no_bit(make: Make, privacy: str, tmp_path: Path) -> None:
    """SCAFFOLD's devices keep control variates, so a device that trains twice must begin from the same ones."""
    bundle = make("scaffold", strategy_options={"control_clip": 1000.0, "clip": 50.0, "bits": 24})
    expected = simulate(bundle, clients(), rounds=2, client_axis="off", privacy=privacy)
    lost: list[Loses] = [lambda worker, message: False, once(has(5))]
    if privacy == "secure":
        lost.append(once(lambda message: message == HAND_OVER))
    for number, loses in enumerate(lost):
        found, crew = rounds_of(bundle, tmp_path / str(number), loses, privacy)
        for name, value in expected.parameters.items():
            np.testing.assert_array_equal(found.standing.parameters[name], value, err_msg=f"{number}: {name}")
        # Each hands over one sum a round, and the largest devices train first.
        assert number or crew.sent.count(HAND_OVER) == (0 if privacy == "plain" else 6)
        if not number:
            parts = [part for part in crew.sent if part != HAND_OVER]
            sizes = [sum(clients().count(client) for client in part) for part in parts]
            first = len(parts) // 2
            assert sizes == 2 * sorted(sizes[:first], reverse=True)


def has(client: int) -> Callable[[Any], bool]:
    return lambda message: isinstance(message, list) and client in message


@pytest.mark.sampled(every=3)
def test_the_first_worker_measures_for_all(make: Make, tmp_path: Path) -> None:
    bundle, settings = make("fedavg"), RoundSettings(cohort=4)
    given = WorkerSettings(bundle.folder, bundle.publisher, clients(), tmp_path, settings, 1, "cpu")
    told: list[bool | RoundSettings] = []
    workers: list[Worker] = []

    def start(number: int, settings: WorkerSettings) -> None:
        assert number == len(workers)
        told.append(settings.client_axis)
        workers.append(Worker(settings))

    way = start_workers(given, 3, start, lambda number: workers[number].way)
    assert told == [settings, way.client_axis, way.client_axis]
    assert way.why.startswith(AT_ONCE if way.client_axis else ONE_BY_ONE)
    assert {type(worker.engine) for worker in workers} == {Lanes if way.client_axis else OneByOne}


def test_clients_that_end_every_worker_are_named(make: Make, tmp_path: Path) -> None:
    bundle = make("fedavg", strategy_options={"clip": 50.0, "bits": 24})
    with pytest.raises(SimulationError, match=r"clients \d+ to \d+: 3 workers were lost with them, the last: worker"):
        rounds_of(bundle, tmp_path, lambda worker, message: has(5)(message), "plain")


def test_a_folder_that_a_machine_does_not_see_is_told(make: Make, tmp_path: Path) -> None:
    bundle = make("scaffold", strategy_options={"control_clip": 1000.0})
    given = WorkerSettings(bundle.folder, bundle.publisher, clients(), tmp_path, False, 1, "cpu", ".shared-1")
    with pytest.raises(SimulationError, match="where devices keep what outlives a round, is not on machine"):
        Worker(given)
    (tmp_path / ".shared-1").touch()
    Worker(given)


def test_a_worker_keeps_no_pages_of_the_examples(tmp_path: Path) -> None:
    x = np.arange(1 << 22, dtype=np.float32).reshape(-1, 256)
    order = np.random.default_rng(0).permutation(len(x))
    for name, array in (("x", x), ("order", order), ("offsets", np.array([0, 8192, len(x)]))):
        np.save(tmp_path / f"{name}.npy", array)
    opened = SplitFiles({"x": tmp_path / "x.npy"}, tmp_path / "order.npy", tmp_path / "offsets.npy").open()
    assert resident_kilobytes("x.npy") < 1000
    for number, rows in enumerate((order[:8192], order[8192:])):
        np.testing.assert_array_equal(opened.take(number)["x"], x[rows])
    assert resident_kilobytes("x.npy") < 1000
    # What is not taken client by client stays.
    assert opened.arrays["x"].sum() > 0
    assert resident_kilobytes("x.npy") > 15000


def resident_kilobytes(name: str) -> int:
    """Of the maps of files with this name."""
    found = Path("/proc/self/smaps").read_text().split(name)[1:]
    return sum(int(part.partition("Rss:")[2].split()[0]) for part in found)


def test_settings_are_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = make("fedavg")
    with pytest.raises(SimulationError, match="cluster: 'slurm' is not 'local' or 'ray'"):
        simulate(bundle, clients(), rounds=1, cluster="slurm")  # type: ignore[arg-type]
    monkeypatch.setattr("archipel.simulation.crews.actors.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'archipel\[ray\]'"):
        simulate(bundle, clients(), rounds=1, client_axis="off", cluster="ray")
