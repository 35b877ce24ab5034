"""A real server over HTTP on loopback, its operator, and agents with a small model and data of their own."""

from __future__ import annotations

import itertools
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from onnx import parser
from sqlalchemy import select
from werkzeug.serving import WSGIRequestHandler, make_server

from archipel import bundle as b
from archipel.bundle import roles
from archipel.client import Agent, AgentConfig, Event, Outcome
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
from archipel.server import create_app, init_data_folder, load_settings
from archipel.server.database.tables import Round
from archipel.server.processes.coordinator import Coordinator
from archipel.server.services import Services

POPULATION = "pupils"
W0 = np.array([0.1, 0.2, 0.3], np.float32)

TRAIN = """<ir_version: 10, opset_import: ["": 21]>
train (float[n, 3] x, float[n] y, float[3] w, float seen, float lr) => (float[3] w_new, float seen_new, float loss) {
    p = MatMul(x, w)
    e = Sub(p, y)
    one = Constant <value_ints = [1]> ()
    zero = Constant <value_ints = [0]> ()
    column = Unsqueeze(e, one)
    products = Mul(x, column)
    g = ReduceMean <keepdims = 0> (products, zero)
    squares = Mul(e, e)
    loss = ReduceMean <keepdims = 0> (squares)
    u = Mul(g, lr)
    w_new = Sub(w, u)
    unit = Constant <value_float = 1.0> ()
    seen_new = Add(seen, unit)
}"""
FINISH = """<ir_version: 10, opset_import: ["": 21]>
finish (float[3] w, float[3] w0, float n) => (float[3] dw, float weight) {
    scale = Constant <value_float = 0.01> ()
    share = Mul(n, scale)
    most = Constant <value_float = 4.0> ()
    weight = Min(share, most)
    change = Sub(w, w0)
    low = Constant <value_float = -1.0> ()
    high = Constant <value_float = 1.0> ()
    bounded = Clip(change, low, high)
    dw = Mul(bounded, weight)
}"""


EVALUATE = """<ir_version: 10, opset_import: ["": 21]>
evaluate (float[n, 3] x, float[n] y, float[3] w) => (float mse) {
    p = MatMul(x, w)
    e = Sub(p, y)
    squares = Mul(e, e)
    mse = ReduceMean <keepdims = 0> (squares)
}"""
LOOK = """<ir_version: 10, opset_import: ["": 21]>
look (float[n] y) => (float total, float count, float[4] bins) {
    total = ReduceSum <keepdims = 0> (y)
    shape = Shape(y)
    n = Cast <to = 1> (shape)
    count = Squeeze(n)
    edges = Constant <value_floats = [-1.0, 0.0, 1.0]> ()
    last = Constant <value_ints = [1]> ()
    column = Unsqueeze(y, last)
    above = GreaterOrEqual(column, edges)
    numbers = Cast <to = 1> (above)
    first = Constant <value_ints = [0]> ()
    reached = ReduceSum <keepdims = 0> (numbers, first)
    upper = Concat <axis = 0> (n, reached)
    zero = Constant <value_floats = [0.0]> ()
    lower = Concat <axis = 0> (reached, zero)
    bins = Sub(upper, lower)
}"""


def make_bundle(folder: Path, key: Ed25519PrivateKey, **policy: Any) -> Path:
    """A linear model with hand-written gradient; device state counts its steps. Returns the .bundle file."""
    f32: dict[str, Any] = {"dtype": "float32"}
    w = roles.Parameter(name="w", tensor="w", shape=(3,), **f32)
    seen: dict[str, Any] = {"tensor": "seen", "lifetime": "device", "shape": (), **f32}
    update: dict[str, Any] = {"weighting": "examples", "range": 4.0, "bits": 20, **f32}
    programs = {
        "train": b.Program(
            kind="train",
            file="train.onnx",
            inputs=(
                roles.Example(name="x", shape=("n", 3), **f32),
                roles.Label(name="y", shape=("n",), **f32),
                w,
                roles.State(name="seen", **seen),
                roles.Hyperparameter(name="lr", shape=(), default=0.1, minimum=0.0, maximum=1.0, **f32),
            ),
            outputs=(
                roles.Parameter(name="w_new", tensor="w", shape=(3,), **f32),
                roles.State(name="seen_new", **seen),
                roles.Metric(name="loss", shape=(), reduction="mean", **f32),
            ),
        ),
        "finish": b.Program(
            kind="finish",
            file="finish.onnx",
            inputs=(
                w,
                roles.Start(name="w0", tensor="w", shape=(3,), **f32),
                roles.Count(name="n", shape=(), of="examples", **f32),
            ),
            outputs=(
                roles.Update(name="dw", tensor="w", kind="delta", shape=(3,), clip=2.0, **update),
                roles.Update(name="weight", tensor="weight", kind="weight", shape=(), lowest=0.01, **update),
            ),
        ),
    }
    x, y = programs["train"].inputs[:2]
    counted: dict[str, Any] = {"kind": "value", "weighting": "uniform", "range": 2.0**18 - 1, "bits": 19, **f32}
    programs["evaluate"] = b.Program(
        kind="evaluate",
        file="evaluate.onnx",
        inputs=(x, y, w),
        outputs=(roles.Metric(name="mse", shape=(), reduction="mean", **f32),),
    )
    programs["look"] = b.Program(
        kind="analyze",
        file="look.onnx",
        inputs=(y,),
        outputs=(
            roles.Update(name="total", tensor="y/sum", shape=(), **{**counted, "range": 100.0}),
            roles.Update(name="count", tensor="y/count", shape=(), **counted),
            roles.Update(name="bins", tensor="spread/histogram", shape=(4,), **counted),
        ),
    )
    statistics = (
        b.Statistic(name="y", kind="mean", program="look"),
        b.Statistic(name="spread", kind="histogram", program="look", edges=(-1.0, 0.0, 1.0)),
    )
    limits = {"peak_bytes": 1 << 16, "flops_per_example": 12, "upload_bytes": 16, **policy.pop("limits", {})}
    privacy = {
        "modes": ("secure",),
        "min_cohort": 3,
        "threshold": 0.6,
        "max_clip": 2.0,
        "max_bits": 20,
        "colluders": 0.0,
        "min_contributors": 1,
        **policy,
    }
    b.write_bundle(
        folder,
        name="linear",
        programs=programs,
        graphs={f"{name}.onnx": parser.parse_model(text).SerializeToString() for name, text in
                (("train", TRAIN), ("finish", FINISH), ("evaluate", EVALUATE), ("look", LOOK))},
        statistics=statistics,
        weights=b.write_weights({"w": W0}),
        parameters=b.parameter_specs({"w": W0}, ["w"]),
        limits=b.Limits(**limits),
        privacy=b.PrivacyPolicy(**privacy),
        key=key,
        schedule=(b.Phase(program="train", epochs=2, batch_size=4),),
        strategy="fedavg",
    )  # fmt: skip
    file = folder.with_suffix(".bundle")
    b.pack(folder, file)
    return file


def states(folder: Path) -> list[DeviceState]:
    """What the device in this folder keeps between rounds, opened with its key."""
    vault = Vault(data_key(FileKeys(folder)))
    return [DeviceState.decode(vault.read(path) or b"") for path in (folder / "state").iterdir()]


def round_seed(folder: Path, digest: str) -> int:
    """What the device in this folder draws in the round with this plan."""
    return RoundSeeds(data_key(FileKeys(folder))).derive(digest)


def local_data(number: int) -> dict[str, np.ndarray]:
    """Device `number`'s own examples: 5 + number of them."""
    rng = np.random.default_rng(number)
    x = rng.standard_normal((5 + number, 3)).astype(np.float32)
    return {"x": x, "y": (x @ np.array([1, -1, 2]) + number).astype(np.float32)}


class _Handler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        with suppress(OSError):
            super().finish()

    def connection_dropped(self, error: BaseException, environ: Any = None) -> None:
        # Werkzeug closes an answer only where it can still read from the client.
        if "tests.answer" in environ:
            environ["tests.answer"].close()

    def log(self, type: str, message: str, *args: Any) -> None:
        pass


class ServerProcess:
    """The web application in threads and a coordinator in another, in this process, on one port."""

    def __init__(self, settings: Any, host: str = "127.0.0.1") -> None:
        self.settings = settings
        self._host = host
        self._services = Services.open(settings)
        self._services.prepare()
        self._stop = threading.Event()
        self.port = 0
        self.start()

    def start(self) -> None:
        self._app = create_app(self.settings)

        def answering(environ: Any, start_response: Any) -> Any:
            environ["tests.answer"] = self._app(environ, start_response)
            return environ["tests.answer"]

        self._web: Any = make_server(self._host, self.port, answering, threaded=True, request_handler=_Handler)
        self._web.connections = set()
        self._web.daemon_threads = False
        self.port = self._web.server_port
        self._stop.clear()
        self._threads = [
            threading.Thread(target=self._web.serve_forever, kwargs={"poll_interval": 0.02}),
            threading.Thread(target=Coordinator(self._services).run, args=(self._stop,)),
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._web.shutdown()
        for thread in self._threads:
            thread.join()
        for connection in list(self._web.connections):
            # Nothing more is read; what is being answered is answered.
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RD)
        self._web.server_close()
        self._app.extensions["archipel"].database.dispose()

    def close(self) -> None:
        self.stop()
        self._services.database.dispose()


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
        total: Any = None
        for agent, number in survivors:
            runtime = Runtime(b.open_bundle(self.folder / "linear", [public_bytes(self.publisher_key)]))
            data = local_data(number)
            update = runtime.local_round(data, seed=round_seed(agent.config.folder, digest), parameters={"w": start})
            layout = Layout.of(runtime.bundle.program("finish"))
            vector = layout.encode(update.arrays, modulus_bits=32, max_cohort=16)
            total = vector if total is None else total + vector
        decoded = layout.decode_sum(total, cohort=len(survivors), modulus_bits=32)
        assert decoded.weight is not None
        return (start + decoded.deltas["w"] / decoded.weight).astype(np.float32)

    def plan_digest(self, round_id: str) -> str:
        with self.server._services.database.read() as session:
            plan = session.scalar(select(Round.plan).where(Round.round_id == round_id))
        return plan_digest(decode("plan", plan, Sealed))


@pytest.fixture
def server_host() -> str:
    """The address that the server listens at; the operator is at 127.0.0.1 in any case."""
    return "127.0.0.1"


@pytest.fixture
def federation(tmp_path: Path, server_host: str) -> Iterator[Federation]:
    with open_federation(tmp_path, server_host) as made:
        yield made


@contextmanager
def open_federation(folder: Path, server_host: str) -> Iterator[Federation]:
    enrolment, publisher = b.generate_key(), b.generate_key()
    operator_token = init_data_folder(
        folder / "server", enrolment_key=public_bytes(enrolment), publisher_keys=[public_bytes(publisher)]
    )
    settings = load_settings(
        folder / "server",
        environment={},
        retry_after=0.02,
        check_in_window=1.0,
        poll_seconds=0.01,
        smallest_answer=1,  # there are a handful of devices
    )
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


@pytest.fixture
def bundle_maker(tmp_path: Path) -> Callable[..., Path]:
    numbers = itertools.count()
    return lambda key, **policy: make_bundle(tmp_path / f"other-{next(numbers)}", key, **policy)


@pytest.fixture
def outcome_of() -> Callable[[Agent, str], Outcome]:
    """Call run_once until it has that kind of outcome."""

    def run(agent: Agent, kind: str, timeout: float = 15.0) -> Outcome:
        deadline = time.monotonic() + timeout
        while True:
            outcome = agent.run_once()
            if outcome.kind == kind:
                return outcome
            assert time.monotonic() < deadline, outcome
            time.sleep(outcome.wait)

    return run
