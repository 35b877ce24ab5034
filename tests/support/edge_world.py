"""A root server, one edge server below it, and other sites that compute their sums themselves, all in this process."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import select

from archipel import bundle as b
from archipel.client import Agent, AgentConfig, Event
from archipel.client.connection.session import DeviceSession
from archipel.client.device import SiteRound
from archipel.client.memory.journal import Journal
from archipel.edge.uplink import agent_config
from archipel.lite_runtime import Runtime
from archipel.operator import OperatorClient, TaskRequest
from archipel.protocol.bounds import entries
from archipel.protocol.identity import EnrolmentToken, mint_token, root_of
from archipel.protocol.messages import RoundPlan
from archipel.protocol.operator.tasks import RoundInfo, TaskInfo
from archipel.protocol.sealed import encode, public_bytes
from archipel.protocol.sites import device_layout, site_vector
from archipel.protocol.uploads import metric_arrays, plan_layout
from archipel.protocol.vector import Layout, Vector
from archipel.server import init_data_folder, load_settings
from archipel.server.database.site_tables import SiteRound as Row
from archipel.server.settings import Settings
from archipel.server.upstream_settings import Upstream
from tests.support.database import migrated_database
from tests.support.linear_bundle import W0, local_data, make_bundle
from tests.support.server import ServerProcess
from tests.support.tree import QUICK, same_draws

SITES = b.Aggregators(min_site_cohort=2, max_site_cohort=4)
TIMES = {"assigning": 20.0, "advertising": 12.0, "sharing": 6.0, "complaining": 6.0, "masking": 6.0, "confirming": 6.0,
         "unmasking": 6.0}  # fmt: skip
"""Only who waits for somebody that is away waits for so long. On a busy machine an edge answers after seconds."""
AT_EDGE, AT_ROOT = "patients", "hospitals"


def seed_of(number: int, round_number: int) -> int:
    """What `same_draws` has the device of that number draw from."""
    return 1000 * number + round_number


def local_sum(bundle: b.Bundle, plan: RoundPlan, numbers: Sequence[int]) -> np.ndarray:
    """The sum of these devices' updates in whole steps, int64 `[length]`, as one who sees all of them computes it."""
    layout = Layout.of(bundle.program("finish"))
    total = np.zeros(plan_layout(plan, bundle.manifest).length - 1, np.int64)
    for number in numbers:
        update = Runtime(bundle).local_round(
            local_data(number), seed=seed_of(number, plan.number), parameters={"w": W0},
            hyperparameters=plan.hyperparameters,
        )  # fmt: skip
        vector = layout.encode(update.arrays, modulus_bits=32, max_cohort=16).astype(np.int64)
        total += np.where(vector >= 1 << 31, vector - (1 << 32), vector)
    return total


def squared_errors(number: int, w: np.ndarray = W0) -> np.ndarray:
    """Of each example of the device of that number, `[examples]`."""
    data = local_data(number)
    return np.asarray((data["x"].astype(np.float64) @ w - data["y"]) ** 2)


def evaluated_sum(bundle: b.Bundle, plan: RoundPlan, numbers: Sequence[int], w: np.ndarray) -> np.ndarray:
    """As `local_sum`, of what these devices send in an evaluation of `w` with the metric mse."""
    layout = device_layout(plan_layout(plan, bundle.manifest))
    total = np.zeros(layout.length, np.int64)
    for number in numbers:
        errors = squared_errors(number, w)
        arrays = metric_arrays(
            {"mse": float(errors.mean())}, plan.metrics, len(errors), plan.max_examples, plan.distributions
        )
        vector = layout.encode(arrays, modulus_bits=32, max_cohort=16).astype(np.int64)
        total += np.where(vector >= 1 << 31, vector - (1 << 32), vector)
    return total


def analysed_sum(bundle: b.Bundle, plan: RoundPlan, numbers: Sequence[int]) -> np.ndarray:
    """As `local_sum`, of what these devices send in an analysis of the program `look`, by NumPy alone."""
    layout = device_layout(plan_layout(plan, bundle.manifest))
    total = np.zeros(layout.length, np.int64)
    for number in numbers:
        y = local_data(number)["y"]
        counts = np.histogram(y, [-np.inf, -1.0, 0.0, 1.0, np.inf])[0]
        total += np.concatenate([[round(float(y.sum()) / 100.0 * (2**18 - 1))], [len(y)], counts, [1]])
    return total


def averaged(bundle: b.Bundle, numbers: Sequence[int], others: Sequence[Mapping[str, np.ndarray]] = ()) -> np.ndarray:
    """The first version that federated averaging makes of these devices, in fixed point, without any server.

    `others`: updates of devices that compute them elsewhere.
    """
    layout = Layout.of(bundle.program("finish"))
    ports = layout.updates
    plan = RoundPlan(
        round_id="0" * 32, task_id="0" * 32, number=1, bundle="0" * 64, weights="0" * 64, privacy="secure",
        min_cohort=2, max_cohort=3, threshold=2, modulus_bits=32, levels=1, site=4,
    )  # fmt: skip
    total = local_sum(bundle, plan, numbers)
    for arrays in others:
        vector = layout.encode(arrays, modulus_bits=32, max_cohort=16)
        total[: layout.length] += vector.view(np.int32)
    sizes = [entries(port) for port in ports]
    scaled = [
        part * (port.range / ((1 << (port.bits - 1)) - 1))
        for port, part in zip(ports, np.split(total, np.cumsum(sizes)[:-1]))
    ]
    # Where devices send no weight each weighs 1.
    change = scaled[0] / (float(scaled[1][0]) if len(scaled) > 1 else len(numbers) + len(others))
    return (W0.astype(np.float64) + change).astype(np.float32)


@dataclass
class ComputedSite:
    """An honest site whose devices' updates one process computes. `lie` changes sum and count before they are sent."""

    numbers: Sequence[int]
    lie: Callable[[np.ndarray, int], tuple[np.ndarray, int]] = lambda total, devices: (total, devices)

    def collect(self, given: SiteRound) -> tuple[Vector, int]:
        if given.plan.kind == "analytics":
            total = analysed_sum(given.bundle, given.plan, self.numbers)
        elif given.plan.kind == "evaluation":
            w = b.read_weights(given.cache.read(given.plan.weights))["w"]
            total = evaluated_sum(given.bundle, given.plan, self.numbers, w)
        else:
            total = local_sum(given.bundle, given.plan, self.numbers)
        total, devices = self.lie(total, len(self.numbers))
        return site_vector(total, devices, given.plan.modulus_bits), devices

    def reconcile(self, journal: Journal) -> None:
        pass

    def follow(self, session: DeviceSession) -> None:
        pass


@dataclass
class EdgeWorld:
    """`root` and `edge` are servers on loopback; the uplink of the edge is for the test to start."""

    folder: Path
    root: ServerProcess
    edge: ServerProcess
    operator: OperatorClient
    edge_operator: OperatorClient
    keys: dict[str, Any]
    bundle_file: Path
    upstream: Upstream
    agents: list[Agent] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    more: dict[str, ServerProcess] = field(default_factory=dict)

    def token(self, name: str, population: str, kind: Any = "device", **changes: Any) -> EnrolmentToken:
        server = {"root": self.root, "edge": self.edge, **self.more}[name]
        seed = secrets.token_bytes(32)
        certificate = mint_token(
            self.keys[name], population=population, not_after=int(time.time()) + 600, seed=seed, kind=kind
        )
        values: dict[str, Any] = {
            "server": f"http://127.0.0.1:{server.port}",
            "server_key": server.settings.public_key,
            "enrolment_key": public_bytes(self.keys[name]),
            "publisher_keys": [public_bytes(self.keys["publisher"])],
            "population": population,
            "seed": seed,
            "certificate": certificate,
        }
        return EnrolmentToken(**{**values, **changes})

    def device_token(self) -> EnrolmentToken:
        return self.token("edge", AT_EDGE, root=root_of(self.token("root", AT_ROOT, "aggregator")))

    def device(self, number: int, token: EnrolmentToken | None = None) -> Agent:
        """With the examples of that number; enrolled at the edge, or where the token is for."""
        config = AgentConfig(folder=self.folder / f"device-{number}", **QUICK)
        agent = Agent(config, examples=lambda: local_data(number), on_event=self.events.append)
        agent.enrol(token or self.device_token())
        self.agents.append(agent)
        return agent

    def add_edge(self, name: str, *, cohort: int = 2) -> ServerProcess:
        """One more edge server, below the edge."""
        self.keys[name] = b.generate_key()
        keys = (public_bytes(self.keys[name]), public_bytes(self.keys["publisher"]))
        upstream = Upstream(population=f"patients-of-{name}", cohort=cohort)
        settings, _ = _settings(self.folder / name, *keys, upstream=upstream)
        self.more[name] = ServerProcess(settings)
        return self.more[name]

    def site(self, name: str, site: ComputedSite, at: str = "root") -> Agent:
        """Another site, enrolled at the root or at the edge."""
        config = AgentConfig(folder=self.folder / f"site-{name}", **QUICK)
        agent = Agent(config, examples=dict, on_event=self.events.append, site=site)
        token = self.token("root", AT_ROOT, "aggregator")
        agent.enrol(token if at == "root" else self.token(at, AT_EDGE, "aggregator", root=root_of(token)))
        self.agents.append(agent)
        return agent

    def uplink_config(self) -> AgentConfig:
        """The uplink's, but impatient."""
        config = agent_config(self.edge._services, self.upstream)
        values = {name: getattr(config, name) for name in config.__struct_fields__ if name != "attributes"}
        quick = ("backoff", "attempts", "pause_seconds", "max_wait", "max_offline_wait")
        return AgentConfig(**{**values, **{name: QUICK[name] for name in quick}})

    def write_token(self) -> bytes:
        """The uplink's token, in its place."""
        data = encode(self.token("root", AT_ROOT, "aggregator"))
        self.edge.settings.path(self.upstream.token).write_bytes(data)
        return data

    def task(self, **changes: Any) -> TaskInfo:
        digest = self.operator.bundles.upload(self.bundle_file).digest
        values: dict[str, Any] = {
            "name": "linear", "population": AT_ROOT, "bundle": digest, "rounds": 1, "min_cohort": 2, "cohort": 3,
            "threshold": 2, "levels": 1, "deadlines": TIMES, **changes,
        }  # fmt: skip
        return self.operator.tasks.create(TaskRequest(**values))

    def rounds(self, task: TaskInfo) -> list[RoundInfo]:
        return list(self.operator.tasks.rounds(task.task_id))

    def weights(self, task: TaskInfo) -> np.ndarray:
        model = self.operator.tasks.get(task.task_id).model
        assert model is not None
        return np.asarray(self.operator.weights.read(model)["w"])

    def rows(self) -> list[Row]:
        """What the edge knows of the root's rounds."""
        with self.edge._services.database.read() as session:
            return list(session.scalars(select(Row).order_by(Row.created)))

    def averaged(self, numbers: Sequence[int]) -> np.ndarray:
        """As `averaged`, of the world's bundle."""
        return averaged(b.open_bundle(self.folder / "linear", [public_bytes(self.keys["publisher"])]), numbers)

    def close(self) -> None:
        for agent in self.agents:
            agent.close()
        for server in self.more.values():
            server.close()

    @contextmanager
    def running(self, agents: Sequence[Agent] | None = None) -> Iterator[None]:
        """`run_forever` in a thread for each agent."""
        stop, errors = threading.Event(), list[BaseException]()

        def work(agent: Agent) -> None:
            try:
                agent.run_forever(stop)
            except BaseException as error:  # noqa: BLE001 - reported by the main thread
                errors.append(error)

        threads = [threading.Thread(target=work, args=(agent,)) for agent in (agents or self.agents)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]

    def until(self, condition: Callable[[], object], seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            told = [(event.name, dict(event.detail)) for event in self.events if event.name != "waiting"][-12:]
            assert time.monotonic() < deadline, (told, [(row.state, row.local_round) for row in self.rows()])
            time.sleep(0.05)


def _settings(folder: Path, enrolment: bytes, publisher: bytes, **more: Any) -> tuple[Settings, str]:
    token = init_data_folder(folder, enrolment_key=enrolment, publisher_keys=[publisher])
    (folder / "archipel.db").write_bytes(migrated_database())
    quick = {"retry_after": 0.05, "check_in_window": 1.0, "poll_seconds": 0.02, "smallest_answer": 1}
    return load_settings(folder, environment={}, **quick, **more), token


@contextmanager
def open_edge_world(
    folder: Path, *, cohort: int = 2, coordinates: bool = True, approval: bool = False, origins: Sequence[str] = (),
    **policy: Any,
) -> Iterator[EdgeWorld]:  # fmt: skip
    """`cohort`: of the edge's rounds for the root; `coordinates`: the edge has a coordinator; `approval`: and wants
    queries approved of; `origins`: of pages that may be its devices; `policy`: fields of the bundle's policy."""
    keys = {name: b.generate_key() for name in ("root", "edge", "publisher")}
    publisher = public_bytes(keys["publisher"])
    bundle_file = make_bundle(folder / "linear", keys["publisher"], **{"min_cohort": 2, "aggregators": SITES, **policy})
    upstream = Upstream(population=AT_EDGE, cohort=cohort)
    at_root, root_token = _settings(folder / "root", public_bytes(keys["root"]), publisher)
    at_edge, edge_token = _settings(
        folder / "edge", public_bytes(keys["edge"]), publisher, upstream=upstream, query_approval=approval,
        allowed_origins=tuple(origins),
    )  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(same_draws())
        root, edge = ServerProcess(at_root), ServerProcess(at_edge, coordinates=coordinates)
        stack.callback(root.close)
        stack.callback(edge.close)
        world = EdgeWorld(
            folder, root, edge, OperatorClient(f"http://127.0.0.1:{root.port}", root_token),
            OperatorClient(f"http://127.0.0.1:{edge.port}", edge_token), keys, bundle_file, upstream,
        )  # fmt: skip
        stack.callback(world.close)
        yield world
