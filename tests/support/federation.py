"""A server over HTTP on loopback, its operator, and agents with data of their own."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import delete, select, update

from archipel import bundle as b
from archipel.client import Agent, AgentConfig, Event
from archipel.client.memory.keystore import FileKeys, data_key
from archipel.client.memory.seeds import RoundSeeds
from archipel.client.memory.vault import Vault
from archipel.lite_runtime import DeviceState, Runtime
from archipel.operator import OperatorClient, TaskRequest
from archipel.protocol.identity import EnrolmentToken, mint_token
from archipel.protocol.operator.tasks import RoundInfo, TaskInfo
from archipel.protocol.policy import plan_digest
from archipel.protocol.sealed import Sealed, decode, public_bytes
from archipel.protocol.vector import Layout
from archipel.server import init_data_folder, load_settings
from archipel.server.database.fault_tables import Rest
from archipel.server.database.tables import CheckInRow, Round
from tests.support.database import migrated_database
from tests.support.linear_bundle import POPULATION, local_data, make_bundle
from tests.support.server import ServerProcess


def states(folder: Path) -> list[DeviceState]:
    """What the device in this folder keeps between rounds, opened with its key."""
    vault = Vault(data_key(FileKeys(folder)))
    return [DeviceState.decode(vault.read(path) or b"") for path in (folder / "state").iterdir()]


def round_seed(folder: Path, digest: str) -> int:
    """What the device in this folder draws in the round with this plan."""
    return RoundSeeds(data_key(FileKeys(folder))).derive(digest)


@dataclass
class Federation:
    """Everything around the agents."""

    folder: Path
    server: ServerProcess
    operator: OperatorClient
    enrolment_key: Ed25519PrivateKey
    publisher_key: Ed25519PrivateKey
    bundle_file: Path
    agents: list[Agent] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    operator_token: str = ""

    data = staticmethod(local_data)
    states = staticmethod(states)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    def token(self, **changes: Any) -> EnrolmentToken:
        seed = secrets.token_bytes(32)
        population = changes.get("population", POPULATION)
        not_after = changes.pop("not_after", int(time.time()) + 600)
        certificate = mint_token(self.enrolment_key, population=population, not_after=not_after, seed=seed)
        values: dict[str, Any] = {
            "server": self.url,
            "server_key": self.server.settings.public_key,
            "enrolment_key": public_bytes(self.enrolment_key),
            "publisher_keys": [public_bytes(self.publisher_key)],
            "population": population,
            "seed": seed,
            "certificate": certificate,
        }
        return EnrolmentToken(**{**values, **changes})

    def config(self, name: str, **changes: Any) -> AgentConfig:
        quick = {
            "backoff": 0.02,
            "attempts": 3,
            "patience": 3.0,
            "pause_seconds": 0.05,
            "max_wait": 1.0,
            "resume_within": 0.2,
            "max_offline_wait": 1.0,
            "isolated": False,
            "look_seconds": 0.2,
        }
        return AgentConfig(folder=self.folder / name, **{**quick, **changes})

    def agent(self, number: int, *, enrol: bool = True, **more: Any) -> Agent:
        options = {key: more.pop(key) for key in ("on_event", "conditions", "examples") if key in more}
        options.setdefault("examples", lambda: local_data(number))
        options.setdefault("on_event", self.events.append)
        agent = Agent(self.config(f"device-{number}", **more), **options)
        self.agents.append(agent)
        if enrol:
            agent.enrol(self.token())
        return agent

    def publish(self) -> str:
        return self.operator.bundles.upload(self.bundle_file).digest

    def task(self, **changes: Any) -> TaskInfo:
        values: dict[str, Any] = {
            "name": "linear", "population": POPULATION, "rounds": 1, "min_cohort": 3, "cohort": 4, "threshold": 3,
            "deadlines": {"assigning": 3.0, "advertising": 4.0, "sharing": 3.0, "complaining": 3.0, "masking": 3.0,
                          "confirming": 3.0, "unmasking": 3.0},
            **changes,
        }  # fmt: skip
        if "bundle" not in values:
            values["bundle"] = self.publish()
        return self.operator.tasks.create(TaskRequest(**values))

    def wait(self, task: TaskInfo, timeout: float = 60.0) -> TaskInfo:
        return self.operator.tasks.wait(task.task_id, timeout=timeout, poll=0.05)

    def rounds(self, task: TaskInfo) -> list[RoundInfo]:
        return list(self.operator.tasks.rounds(task.task_id))

    def end_rests(self) -> None:
        """Let rounds take devices again that have left one, else they rest for half a minute."""
        with self.server._services.database.write() as session:
            session.execute(delete(Rest))

    def end_waiting(self) -> None:
        """Let no round take devices that have gone, which count as waiting for a while after their last check-in."""
        with self.server._services.database.write() as session:
            session.execute(update(CheckInRow).where(CheckInRow.round_id.is_(None)).values(due=1.0))

    def run(self, agents: Sequence[Agent], until: Callable[[], bool], timeout: float = 60.0) -> None:
        """`run_forever` in a thread for each agent, until the condition holds and no round is under way."""
        stop = threading.Event()
        errors: list[BaseException] = []

        def work(agent: Agent) -> None:
            try:
                agent.run_forever(stop)
            except BaseException as error:  # noqa: BLE001 - reported by the main thread
                errors.append(error)

        threads = [threading.Thread(target=work, args=(agent,)) for agent in agents]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout
        try:
            while not until() and not errors:
                assert time.monotonic() < deadline, [event.name for event in self.events][-30:]
                time.sleep(0.02)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]

    def names(self, agent: Agent) -> list[str]:
        """Names of the agent's events, without waiting."""
        return [e.name for e in self.events if e.device_id == agent.device_id and e.name != "waiting"]

    def expected_weights(self, start: np.ndarray, survivors: Sequence[tuple[Agent, int]], task: TaskInfo) -> np.ndarray:
        """What plain federated averaging over these devices makes of `start`, in fixed point, without any mask."""
        [info] = [r for r in self.rounds(task) if r.phase == "committed"][-1:]
        digest = self.plan_digest(info.round_id)
        total: np.ndarray | None = None
        for agent, number in survivors:
            runtime = Runtime(b.open_bundle(self.folder / "linear", [public_bytes(self.publisher_key)]))
            data = local_data(number)
            update = runtime.local_round(data, seed=round_seed(agent.config.folder, digest), parameters={"w": start})
            layout = Layout.of(runtime.bundle.program("finish"))
            vector = layout.encode(update.arrays, modulus_bits=32, max_cohort=16)
            total = vector if total is None else total + vector
        assert total is not None
        decoded = layout.decode_sum(total, cohort=len(survivors), modulus_bits=32)
        assert decoded.weight is not None
        return (start + decoded.deltas["w"] / decoded.weight).astype(np.float32)

    def plan_digest(self, round_id: str) -> str:
        with self.server._services.database.read() as session:
            plan = session.scalar(select(Round.plan).where(Round.round_id == round_id))
        assert plan is not None
        return plan_digest(decode("plan", plan, Sealed))


@contextmanager
def open_federation(
    folder: Path, server_host: str, publisher: Ed25519PrivateKey | None = None, **more: Any
) -> Iterator[Federation]:
    """`publisher`: of the bundles, which may be a development key; None: a new one. `more`: settings of the server."""
    enrolment, publisher = b.generate_key(), publisher or b.generate_key()
    operator_token = init_data_folder(
        folder / "server",
        enrolment_key=public_bytes(enrolment),
        publisher_keys=[public_bytes(publisher)],
        allow_development=b.is_development_key(public_bytes(publisher)),
    )
    (folder / "server" / "archipel.db").write_bytes(migrated_database())
    quick = {"retry_after": 0.02, "check_in_window": 1.0, "poll_seconds": 0.01}
    # There are a handful of devices.
    settings = load_settings(folder / "server", environment={}, **{**quick, "smallest_answer": 1, **more})
    server = ServerProcess(settings, server_host)
    operator = OperatorClient(f"http://127.0.0.1:{server.port}", operator_token)
    made = Federation(
        folder=folder,
        server=server,
        operator=operator,
        operator_token=operator_token,
        enrolment_key=enrolment,
        publisher_key=publisher,
        bundle_file=make_bundle(folder / "linear", publisher),
    )
    try:
        yield made
    finally:
        for agent in made.agents:
            agent.close()
        operator.close()
        server.close()
