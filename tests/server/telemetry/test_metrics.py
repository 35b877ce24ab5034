"""What a server measures, against what was done to it."""

from __future__ import annotations

import os
import re
import signal
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from archipel import __version__
from archipel.operator import OperatorClient
from archipel.server.app import create_app
from archipel.server.database.fault_tables import Quarantine
from archipel.server.database.tables import Device as DeviceRow
from archipel.server.processes import figures
from archipel.server.processes.coordinator import Coordinator
from archipel.server.processes.lease import Lease
from archipel.server.services import Services
from archipel.server.storage.folder import FolderStorage
from archipel.server.telemetry.measures import Measures
from archipel.server.telemetry.watching import WatchedStorage
from tests.server.rounds.noisy import central, equal_weights, run_round
from tests.server.rounds.test_plain_rounds import update
from tests.support.patience import stretched
from tests.support.scraping import FlushedRegistry, Samples, free_port, read_samples, samples_of, scrape, value
from tests.support.serving import Server
from tests.support.world import DataFolder, World

PAGE = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"


@pytest.fixture
def measured(world: World) -> CollectorRegistry:
    """The world with measurements of its web application and its coordinator."""
    registry = FlushedRegistry()
    measures = registry.measures
    world.app.extensions["archipel"].database.dispose()
    world.app = create_app(world.settings, clock=world.clock, measures=measures)
    world.coordinator = Coordinator(Services.open(world.settings, clock=world.clock, measures=measures))
    return registry


@pytest.mark.sampled(every=3)
def test_requests_are_counted_by_route_method_and_status(world: World, measured: CollectorRegistry) -> None:
    for _ in range(3):
        assert world.transport("GET", "/v1/server", None, {})[0] == 200
    assert world.transport("GET", "/v1/tasks", None, {})[0] == 401
    body = b"x" * 100
    assert world.transport("POST", "/v1/devices", body, {})[0] == 400
    assert world.transport("GET", "/v1/rounds/" + "0" * 32, None, {})[0] == 401
    found = samples_of(measured)
    requests = "archipel_http_requests_total"
    assert value(found, requests, route="/v1/server", method="GET", status="200") == 3
    assert value(found, requests, route="/v1/tasks", method="GET", status="401") == 1
    assert value(found, requests, route="/v1/devices", method="POST", status="400") == 1
    assert value(found, requests, route="/v1/rounds/{round_id}") == 1
    assert value(found, requests) == 6
    assert value(found, "archipel_http_request_seconds_count") == 6
    assert value(found, "archipel_http_received_bytes_total") == 100
    answer = world.transport("GET", "/v1/server", None, {})[1]
    assert value(found, "archipel_http_sent_bytes_total", route="/v1/server") == 3 * len(answer)
    assert value(found, "archipel_http_requests_in_progress") == 0
    assert value(found, "archipel_database_statement_seconds_count") > 0


@pytest.mark.sampled(every=4)
def test_a_round_is_measured(world: World, measured: CollectorRegistry) -> None:
    task = world.create_task(privacy="plain", threshold=None, cohort=3, rounds=2, deadlines={"updating": 50})
    devices = world.add_devices(3)
    world.start_round(devices)
    world.clock.now += 7
    for index, device in enumerate(devices):
        device.updating(**update(index))
    world.settle()
    assert world.task(task["task_id"])["rounds_committed"] == 1
    world.start_round(devices)
    world.clock.now += 51  # nobody uploads
    world.settle()
    found = samples_of(measured)
    assert value(found, "archipel_rounds_ended_total", kind="training", privacy="plain", outcome="committed") == 1
    assert value(found, "archipel_rounds_ended_total", kind="training", privacy="plain", outcome="failed") == 1
    assert value(found, "archipel_round_phase_seconds_count", kind="training", phase="updating") == 2
    assert value(found, "archipel_round_phase_seconds_sum", kind="training", phase="updating") == pytest.approx(58)
    assert value(found, "archipel_round_seconds_count", kind="training") == 1
    assert value(found, "archipel_updates_acknowledged_total") == 3
    # Each device checks in before each round, and asks for its plan once.
    assert value(found, "archipel_check_ins_answered_total") == 12
    assert value(found, "archipel_aggregation_seconds_count") == 1
    assert value(found, "archipel_storage_seconds_count", operation="keep") >= 3
    assert value(found, "archipel_database_write_seconds_count") > 0


@pytest.mark.sampled(every=3)
def test_folded_updates_are_counted(world: World, measured: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archipel.server.rounds.folding.BATCH", 2)
    world.create_task(privacy="plain", threshold=None, cohort=3, min_cohort=3)
    devices = world.add_devices(3)
    world.start_round(devices)
    for index in range(2):
        devices[index].updating(**update(index))
    world.settle()
    found = samples_of(measured)
    assert value(found, "archipel_updates_folded_total") == 2
    assert value(found, "archipel_fold_seconds_count") == 1


def test_failures_of_the_store_are_counted_and_missing_files_are_none(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    storage = WatchedStorage(FolderStorage(tmp_path), Measures(registry))
    storage.prepare()
    with pytest.raises(FileNotFoundError):
        storage.read("sha256/00/nothing")
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        storage.read("folder")

    def gone() -> object:
        yield b"begin"
        raise ConnectionResetError("the sender is gone")

    with pytest.raises(ConnectionResetError):
        storage.receive("incoming", gone())  # type: ignore[arg-type]
    storage.make_folder("a")
    storage.keep(storage.receive("a", [b"b", b"c"]), "a/b")
    with storage.hold("a/b", "") as path:
        assert path.read_bytes() == b"bc"
    found = samples_of(registry)
    assert value(found, "archipel_storage_errors_total", operation="read") == 1
    assert value(found, "archipel_storage_errors_total") == 1
    assert value(found, "archipel_storage_seconds_count", operation="read") == 2
    assert value(found, "archipel_storage_seconds_count", operation="receive") == 2


def figures_of(world: World, *, leads: bool = True) -> Samples:
    lease = Lease(world.services.database, "a" * 32, clock=world.clock, seconds=10)
    if leads:
        assert lease.take()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(figures.Figures(world.services, lease))
    return samples_of(registry)


@pytest.mark.sampled(every=3)
def test_figures_of_the_database(world: World) -> None:
    world.create_task(privacy="plain", threshold=None, cohort=3, min_cohort=3)
    devices = world.add_devices(7)
    world.start_round(devices[:3])
    assert devices[3].check_in() is None  # waits
    devices[4].check_in()
    devices[6].check_in()
    with world.services.database.write() as session:
        session.get_one(DeviceRow, devices[5].id).revoked = world.clock.now
        round_id = world.rounds(world.operator("GET", "/v1/tasks")[1]["items"][0]["task_id"])[0]["round_id"]
        session.add(
            Quarantine(
                device_id=devices[4].id, population="pupils", reason="faults", detail="three",
                round_id=round_id, since=world.clock.now, until=world.clock.now + 99, times=1,
            )
        )  # fmt: skip
    found = figures_of(world)
    states = ("in-round", "waiting", "set-aside", "revoked", "away")
    shown = {state: value(found, "archipel_devices", population="pupils", state=state) for state in states}
    assert shown == {"in-round": 3, "waiting": 2, "set-aside": 1, "revoked": 1, "away": 0}
    assert value(found, "archipel_rounds_live", kind="training", phase="updating") == 1
    assert value(found, "archipel_tasks", kind="training", state="running") == 1
    assert value(found, "archipel_lease_held") == 1
    assert value(found, "archipel_lease_expires_seconds") == world.clock.now + 10
    assert value(found, "archipel_build_info", version=__version__) == 1
    assert value(found, "archipel_disk_free_bytes", folder="data") > 0
    world.clock.now += 3600
    assert value(figures_of(world), "archipel_devices", state="away") == 3  # its time aside is over as well
    # Of several servers of one database only the one with the lease shows its figures.
    idle = figures_of(world, leads=False)
    assert value(idle, "archipel_lease_held") == 0
    assert not any(name in ("archipel_devices", "archipel_tasks") for name, _ in idle)


def test_many_populations_are_added_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "MOST_POPULATIONS", 2)
    sizes = {"a": 1, "b": 3, "c": 2, "d": 1}
    counts = {(name, "away"): float(number) for name, number in sizes.items()}
    assert figures._at_most(counts) == {("b", "away"): 3, ("c", "away"): 2, (figures.OTHERS, "away"): 2}


@pytest.mark.sampled(every=8)
def test_the_account_of_privacy_is_shown(world: World, tmp_path: Path) -> None:
    equal_weights(world, tmp_path)
    task = world.create_task(cohort=3, rounds=5, differential_privacy=central(1.0, epsilon=50.0))
    labels = {"population": "pupils", "model": "tiny"}
    assert value(figures_of(world), "archipel_privacy_epsilon_spent", **labels) == 0
    run_round(world, world.add_devices(3))
    found = figures_of(world)
    assert value(found, "archipel_privacy_epsilon_limit", **labels) == 50
    spent = world.task(task["task_id"])["privacy_spent"]["epsilon"]
    assert spent > 0
    assert value(found, "archipel_privacy_epsilon_spent", **labels) == pytest.approx(spent)


def test_the_page_names_every_metric_and_no_other(world: World, measured: CollectorRegistry) -> None:
    described = set(re.findall(r"^\| `(archipel_\w+)` \|", PAGE.read_text(), re.M))
    families = {family.name: family.type for family in measured.collect()}
    own = {f"{name}_total" if kind == "counter" else name for name, kind in families.items()}
    lease = Lease(world.services.database, "a" * 32, clock=world.clock, seconds=10)
    assert lease.take()
    own |= {family.name for family in figures.Figures(world.services, lease).collect()}
    assert described == own


def wait_until(what: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + stretched(seconds)
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def is_scraped(port: int) -> bool:
    with suppress(urllib.error.URLError, ConnectionError):
        return bool(scrape(port))
    return False


@pytest.fixture
def server(data_folder: DataFolder) -> Iterator[Server]:
    made = Server(data_folder[0])
    yield made
    if made.alive:
        made.stop(signal.SIGKILL)


@pytest.mark.sampled(every=4)
def test_one_address_shows_all_processes_and_a_killed_one_loses_nothing(
    server: Server, data_folder: DataFolder
) -> None:
    port = free_port()
    url = server.start(metrics_port=str(port), workers="2", anonymous_per_second="10000")
    route = {"route": "/v1/server", "method": "GET", "status": "200"}

    def ask(times: int) -> None:
        for _ in range(times):
            # A connection of its own each time, which any of the processes may take.
            with OperatorClient(url, data_folder[1]) as client:
                client.server.info()

    folder = data_folder[0] / "metrics"
    wait_until(lambda: (folder / "web-1.pid").exists())  # the first one says that the server is up
    ask(20)
    wait_until(lambda: value(read_samples(scrape(port)), "archipel_http_requests_total", **route) >= 20)
    found = read_samples(scrape(port))
    assert value(found, "archipel_http_requests_total", **route) == 20
    assert value(found, "archipel_lease_held") == 1
    names = {dict(labels)["process"] for name, labels in found if name == "archipel_process_resident_bytes"}
    assert names == {"coordinator-0", "web-0", "web-1", "supervisor"}
    assert folder.stat().st_mode & 0o777 == 0o700
    for name in ("web-0", "web-1", "coordinator-0"):
        before = int((folder / f"{name}.pid").read_text())
        os.kill(before, signal.SIGKILL)
        wait_until(lambda name=name, before=before: (folder / f"{name}.pid").read_text() not in ("", str(before)))
    wait_until(lambda: is_scraped(port))
    ask(5)
    wait_until(lambda: value(read_samples(scrape(port)), "archipel_http_requests_total", **route) >= 25)
    found = read_samples(scrape(port))
    assert value(found, "archipel_http_requests_total", **route) == 25
    assert len(list(folder.glob("counter_*.db"))) == 3
    assert server.stop() == 0
    assert not folder.exists()
