"""Web processes, coordinator, supervisor and database die at random while agents work; no round is wrong or hangs.

Every committed round must be the mean of the updates of exactly the devices that it names, computed again from the
agents' own data by the runtime, without server or masks.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipel import bundle as b
from archipel.client import Agent
from archipel.lite_runtime import Runtime
from archipel.operator import OperatorClient, TaskRequest
from archipel.protocol.operator.tasks import RoundInfo
from archipel.protocol.sealed import public_bytes
from archipel.protocol.vector import Layout
from archipel.server import init_data_folder, load_settings
from archipel.server.services import Services
from tests.server.processes.test_processes import SERVE, Server
from tests.support.cluster import Cluster
from tests.support.federation import Federation, round_seed
from tests.support.linear_bundle import POPULATION, W0, make_bundle

AGENTS = 4
SHORT, LONG = 8.0, 240.0
GOALS = {"secure": {"threshold": 3}, "plain": {"privacy": "plain"}}


class Processes(Server):
    """Supervisor, gunicorn and coordinator on PostgreSQL; `port` stays the same over restarts."""

    def __init__(self, folder: Path, database: str) -> None:
        super().__init__(folder)
        self.database = database
        self.settings = load_settings(folder, environment={}, database=database)
        self._services = Services.open(self.settings)
        self.port = 0

    def start(self, port: int = 0) -> str:
        environment = os.environ | {
            "ARCHIPEL_SERVER_DATABASE": self.database, "ARCHIPEL_SERVER_RETRY_AFTER": "0.05",
            "ARCHIPEL_SERVER_CHECK_IN_WINDOW": "5", "ARCHIPEL_SERVER_LEASE_SECONDS": "2",
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(self.folder), str(port)], stdout=subprocess.PIPE, text=True,
            env=environment,
        )  # fmt: skip
        self.port = int(self.process.stdout.readline().rsplit(":", 1)[1])
        return f"http://127.0.0.1:{self.port}"

    def kill(self, what: str) -> None:
        """SIGKILL to one of the processes; a supervisor's children die with it, and the test starts another."""
        if what == "supervisor":
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()
            deadline = time.monotonic() + 20
            while self.children() and time.monotonic() < deadline:
                time.sleep(0.05)
            self.start(self.port)
        else:
            found = self.children().get(what)
            if found is not None:
                with suppress(ProcessLookupError):
                    os.kill(found, signal.SIGKILL)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30)
        self.process.stdout.close()
        self._services.database.dispose()


def reference(
    federation: Federation, agents: dict[str, int], info: RoundInfo, start: np.ndarray, plain: bool
) -> np.ndarray:
    """The mean of what the named devices must have sent, in fixed point where the round was secure."""
    runtime = Runtime(b.open_bundle(federation.folder / "linear", [public_bytes(federation.publisher_key)]))
    layout = Layout.of(runtime.bundle.program("finish"))
    digest = federation.plan_digest(info.round_id)
    total, weight = np.zeros(3), 0.0
    for device in info.survivors:
        seed = round_seed(federation.folder / f"device-{agents[device]}", digest)
        update = runtime.local_round(federation.data(agents[device]), seed=seed, parameters={"w": start}).arrays
        if plain:
            total += update["dw"].astype(np.float64)
            weight += float(update["weight"])
        else:
            vector = layout.encode(update, modulus_bits=32, max_cohort=16)
            decoded = layout.decode_sum(vector, cohort=1, modulus_bits=32)
            total += decoded.deltas["w"]
            weight += float(decoded.weight or 0.0)
    return (start + total / weight).astype(np.float32)


@pytest.mark.parametrize(
    ("privacy", "seconds"),
    [("secure", SHORT), pytest.param("secure", LONG, marks=pytest.mark.slow),
     pytest.param("plain", LONG, marks=pytest.mark.slow)],
)  # fmt: skip
@pytest.mark.sampled(every=8)
def test_whatever_dies_every_round_is_the_sum_it_names(
    tmp_path: Path, cluster: Cluster, database_url: str, privacy: str, seconds: float
) -> None:
    enrolment, publisher = b.generate_key(), b.generate_key()
    token = init_data_folder(
        tmp_path / "server", enrolment_key=public_bytes(enrolment), publisher_keys=[public_bytes(publisher)]
    )
    server: Any = Processes(tmp_path / "server", database_url)
    operator = OperatorClient(server.start(), token)
    file = make_bundle(tmp_path / "linear", publisher, modes=("secure", "plain"))
    federation = Federation(tmp_path, server, operator, enrolment, publisher, file)
    calm = {"patience": 60.0, "attempts": 8, "backoff": 0.05, "allow_plain": True}
    agents: dict[str, int] = {}
    for number in range(AGENTS):
        agents[federation.agent(number, **calm).device_id] = number
    deadlines = dict.fromkeys(
        ("assigning", "advertising", "sharing", "complaining", "masking", "confirming", "unmasking"), 8.0
    )
    task = operator.tasks.create(
        TaskRequest(
            name="linear", population=POPULATION, bundle=federation.publish(), rounds=1_000_000, min_cohort=3,
            cohort=AGENTS, deadlines={**deadlines, "updating": 8.0, "aggregating": 20.0}, **GOALS[privacy],
        )
    )  # fmt: skip
    stop = threading.Event()
    errors: list[BaseException] = []

    def work(agent: Agent) -> None:
        while not stop.is_set():
            try:
                agent.run_forever(stop)
            except BaseException as error:  # noqa: BLE001 - reported by the main thread
                errors.append(error)
                return

    threads = [threading.Thread(target=work, args=(agent,)) for agent in federation.agents]
    for thread in threads:
        thread.start()
    generator = random.Random(5)
    kills: dict[str, int] = {}
    try:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not errors:
            time.sleep(generator.uniform(0.3, 2.5))
            what = generator.choice(
                ["worker", "coordinator", "worker", "coordinator", "gunicorn", "database", "supervisor"]
            )
            kills[what] = kills.get(what, 0) + 1
            cluster.crash() if what == "database" else server.kill(what)
        # Nothing hangs: left alone, it makes two more versions.
        goal = committed(operator, task.task_id) + 2
        deadline = time.monotonic() + 90
        while committed(operator, task.task_id) < goal and not errors:
            assert time.monotonic() < deadline, list(operator.tasks.rounds(task.task_id))[-3:]
            time.sleep(0.2)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors, errors
    assert sum(kills.values()) >= seconds / 3
    operator.tasks.cancel(task.task_id)
    start = W0
    rounds = [info for info in operator.tasks.rounds(task.task_id) if info.phase == "committed"]
    assert [info.number for info in rounds] == list(range(1, len(rounds) + 1))
    for info in rounds:
        assert len(info.survivors) >= 3
        made = operator.weights.read(info.weights_out or "")["w"]
        np.testing.assert_allclose(
            made, reference(federation, agents, info, start, privacy == "plain"), rtol=1e-6, atol=1e-7
        )
        start = made
    counted = {
        (entry.round_id, agent.device_id)
        for agent in federation.agents
        for entry in agent.rounds
        if entry.result == "took_part"
    }
    named = {(info.round_id, device) for info in rounds for device in info.survivors}
    assert counted <= named, "a device thinks that it counts and does not"
    for agent in federation.agents:
        agent.close()
    operator.close()
    server.close()


def committed(operator: OperatorClient, task_id: str) -> int:
    """Asked until the server answers."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return operator.tasks.get(task_id).rounds_committed
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
