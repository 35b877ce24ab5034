"""A server on a real data folder, a clock that tests turn, and devices that speak the protocol."""

from __future__ import annotations

import hashlib
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.bundle import (
    Limits,
    Lineage,
    Phase,
    PrivacyPolicy,
    Program,
    Statistic,
    generate_key,
    pack,
    parameter_specs,
    write_bundle,
    write_weights,
)
from archipel.bundle.roles import Example, Hyperparameter, Metric, Parameter, Start, Update
from archipel.protocol import identity, messages
from archipel.protocol.policy import plan_digest
from archipel.protocol.sealed import Sealed, encode, public_bytes, seal, unseal
from archipel.protocol.secagg import Participant
from archipel.protocol.vector import pack as pack_vector
from archipel.server.database.engine import Database
from archipel.server.http.app import create_app
from archipel.server.processes.coordinator import Coordinator
from archipel.server.services import Services
from archipel.server.settings import Settings, init_data_folder, load_settings

START = 1_800_000_000.0
# Chosen so that one step of the fixed-point encoding is a power of two, and sums come out exactly in float32.
DELTA_RANGE, DELTA_STEP = 32767 / 256, 1 / 256
WEIGHT_RANGE, WEIGHT_STEP = 32767 / 4096, 1 / 4096
LENGTH = 6 + 2 + 1
POPULATION = "pupils"
NO_NODES = b"\x08\x0a\x3a\x00\x42\x02\x10\x15"
"""A ModelProto of IR version 10 and opset 21 with an empty graph."""

Transport = Callable[[str, str, bytes | None, dict[str, str]], tuple[int, bytes]]


def nothing_learned() -> np.ndarray:
    """What a device sums up whose model did not move: deltas of 0, a weight of 1."""
    vector = np.zeros(LENGTH, np.uint32)
    vector[-1] = round(1 / WEIGHT_STEP)
    return vector


@dataclass
class Clock:
    now: float = START

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Keys:
    enrolment: Ed25519PrivateKey = field(default_factory=generate_key)
    publisher: Ed25519PrivateKey = field(default_factory=generate_key)


class Device:
    """One owner's device: enrols, opens a session, takes part in rounds. `vector` is what it sums up, uint32."""

    def __init__(self, transport: Transport, keys: Keys, server_key: bytes, *, not_after: float = START + 1e6) -> None:
        self.transport, self.keys, self.server_key = transport, keys, server_key
        seed = secrets.token_bytes(32)
        certificate = identity.mint_token(
            keys.enrolment, population=POPULATION, not_after=int(not_after), seed=seed, kind="device"
        )
        self.enrolment_token = identity.EnrolmentToken(
            server="http://unused",
            server_key=server_key,
            enrolment_key=public_bytes(keys.enrolment),
            publisher_keys=[public_bytes(keys.publisher)],
            population=POPULATION,
            seed=seed,
            certificate=certificate,
        )
        self.key = generate_key()
        self.id = identity.device_id(public_bytes(self.key))
        self.chain = identity.issue_identity(seed, certificate, public_bytes(self.key))
        self.token = ""
        self.plan: messages.RoundPlan | None = None
        self.participant: Any = None
        self.vector = nothing_learned()
        self.masked = b""
        self.attributes: dict[str, str | float | bool] = {}
        self.versions: dict[str, int] | None = None
        self.offers: list[messages.Offer] = []

    def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) or body is None else encode(body)
        extra = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        status, answer = self.transport(method, path, data, {**extra, **(headers or {})})
        return status, msgspec.json.decode(answer) if answer[:1] in (b"{", b"[") else answer

    def ask(self, method: str, path: str, kind: Any, body: Any = None, **headers: str) -> Any:
        status, answer = self.call(method, path, body, headers)
        assert status in (200, 201), (method, path, status, answer)
        return msgspec.convert(answer, kind) if not isinstance(answer, bytes) else answer

    def enrol(self) -> Device:
        request = identity.enrolment_request(self.enrolment_token, self.key)
        assert self.ask("POST", "/v1/devices", messages.EnrolmentResponse, request).device_id == self.id
        return self

    def open_session(self) -> Device:
        self.token = ""
        nonce = self.challenge().nonce
        self.token = self.ask("POST", "/v1/sessions", messages.SessionResponse, self.session_request(nonce)).token
        return self

    def challenge(self) -> messages.Challenge:
        return self.ask("POST", "/v1/challenges", messages.Challenge, messages.ChallengeRequest(device_id=self.id))

    def session_request(self, nonce: bytes) -> messages.SessionRequest:
        proof = seal("session", messages.SessionProof(nonce=nonce, server_key=self.server_key), self.key)
        return messages.SessionRequest(device_id=self.id, proof=proof)

    def check_in(self) -> Sealed | None:
        request = messages.CheckIn(attributes=self.attributes, versions=self.versions)
        answer = self.ask("POST", "/v1/check-ins", messages.CheckInResponse, request)
        self.offers = [unseal("offer", each, self.server_key, messages.Offer) for each in answer.offers]
        return answer.plan

    # The steps of a round, each one call on the API (or a read and a write).

    def join(self) -> bool:
        """Fetch the plan, if there is one."""
        sealed = self.check_in()
        if sealed is None:
            return False
        self.plan = unseal("plan", sealed, self.server_key, messages.RoundPlan)
        if self.plan.privacy == "plain":
            return True
        self.participant = Participant(
            self.plan, plan_digest(sealed), self.key, self.chain, public_bytes(self.keys.enrolment), secrets.token_bytes
        )
        return True

    @property
    def round(self) -> str:
        assert self.plan is not None
        return f"/v1/rounds/{self.plan.round_id}"

    def status(self) -> messages.RoundStatus:
        return self.ask("GET", self.round, messages.RoundStatus)

    def advertising(self) -> None:
        self.ask("PUT", f"{self.round}/advertisement", messages.Receipt, self.participant.advertise())

    def sharing(self) -> None:
        cohort = self.ask("GET", f"{self.round}/cohort", messages.Cohort)
        self.ask("PUT", f"{self.round}/shares", messages.Receipt, self.participant.share(cohort))

    def complaining(self) -> None:
        inbox = self.ask("GET", f"{self.round}/shares", messages.Shares)
        self.ask("PUT", f"{self.round}/complaints", messages.Receipt, self.participant.complain(inbox))

    def masking(self) -> None:
        complaints = self.ask("GET", f"{self.round}/complaints", messages.Complaints)
        assert self.plan is not None
        self.masked = pack_vector(self.participant.mask(self.vector, complaints), self.plan.modulus_bits)
        self.upload(self.masked)

    def upload(self, data: bytes) -> None:
        headers = {"Digest-SHA256": hashlib.sha256(data).hexdigest(), "Content-Type": "application/octet-stream"}
        self.ask("PUT", f"{self.round}/update", messages.Receipt, data, **headers)

    def updating(self, **arrays: Any) -> None:
        """Upload a plain update: arrays by output name."""
        self.upload(write_weights({name: np.asarray(array, np.float32) for name, array in arrays.items()}))

    def try_upload(self, data: bytes) -> tuple[int, Any]:
        headers = {"Digest-SHA256": hashlib.sha256(data).hexdigest(), "Content-Type": "application/octet-stream"}
        return self.call("PUT", f"{self.round}/update", data, headers)

    def confirming(self) -> None:
        survivors = self.ask("GET", f"{self.round}/survivors", messages.Survivors)
        request = messages.ConfirmRequest(confirmation=self.participant.confirm(survivors))
        self.ask("PUT", f"{self.round}/confirmation", messages.Receipt, request)

    def unmasking(self) -> None:
        confirmations = self.ask("GET", f"{self.round}/confirmations", messages.Confirmations)
        self.ask("PUT", f"{self.round}/unmasking", messages.Receipt, self.participant.unmask(confirmations))

    def answer(self, phase: str) -> None:
        getattr(self, phase)()


ANSWERED = ("advertising", "sharing", "complaining", "masking", "confirming", "unmasking")


@dataclass
class World:
    """One server in this process: the web application, a coordinator to step by hand, and its devices."""

    settings: Settings
    operator_token: str
    keys: Keys
    clock: Clock
    services: Services
    bundle_file: Path
    app: Any = None
    coordinator: Any = None
    devices: list[Device] = field(default_factory=list)

    def transport(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        with self.app.test_client() as client, client.open(path, method=method, data=body, headers=headers) as response:
            return response.status_code, response.get_data()

    def operator(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) or body is None else msgspec.json.encode(body)
        extra = {"Authorization": f"Bearer {self.operator_token}", **(headers or {})}
        status, answer = self.transport(method, path, data, extra)
        return status, msgspec.json.decode(answer) if answer[:1] in (b"{", b"[") else answer

    def restart_coordinator(self) -> None:
        """As after kill -9: nothing of the old one's memory is there."""
        if self.coordinator._services is not self.services:
            self.coordinator._services.database.dispose()  # the system closes what a killed process held
        self.coordinator = Coordinator(Services.open(self.settings, clock=self.clock))
        self.coordinator.recover()

    def add_devices(self, count: int) -> list[Device]:
        added = [Device(self.transport, self.keys, self.settings.public_key) for _ in range(count)]
        for device in added:
            device.enrol().open_session()
        self.devices += added
        return added

    def publish(self) -> str:
        status, answer = self.operator("POST", "/v1/bundles", self.bundle_file.read_bytes())
        assert status in (200, 201), answer
        return str(answer["digest"])

    def create_task(self, **settings: Any) -> Any:
        values = {
            "name": "digits", "population": POPULATION, "rounds": 1, "min_cohort": 3, "cohort": 5, "threshold": 3,
            **settings,
        }  # fmt: skip
        values.setdefault("bundle", self.publish())
        status, answer = self.operator("POST", "/v1/tasks", values)
        assert status == 201, answer
        return answer

    def stored(self, folder: str) -> dict[str, bytes]:
        """All files below `folder`, half-written ones too, by their path."""
        root = self.settings.blob_folder / folder
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}

    def damage(self, key: str) -> None:
        """Replace a stored file's bytes by as many zeros."""
        path = self.settings.blob_folder / key
        path.write_bytes(bytes(path.stat().st_size))

    def task(self, task_id: str) -> Any:
        return self.operator("GET", f"/v1/tasks/{task_id}")[1]

    def rounds(self, task_id: str) -> list[Any]:
        found = self.operator("GET", f"/v1/tasks/{task_id}/rounds?limit=500")[1]["items"]
        # The clock may have stood still, and then the server's order is that of their ids.
        return sorted(found, key=lambda row: (row["started"], row["number"]))

    def settle(self, steps: int = 50) -> None:
        """Let the coordinator do everything that is due now."""
        for _ in range(steps):
            if not self.coordinator.step():
                return
        raise AssertionError("the coordinator does not come to rest")

    def start_round(self, devices: Sequence[Device]) -> None:
        """Devices check in, a round opens, and all of them join it (phase advertising)."""
        for device in devices:
            assert device.check_in() is None
        self.settle()
        assert all(device.join() for device in devices)

    def start_round_at_deadline(self, devices: Sequence[Device]) -> None:
        """The same with fewer devices than the cohort: the round goes on without the rest at its deadline."""
        for device in devices:
            device.check_in()
        self.settle()
        self.clock.now += 61
        for device in devices:
            device.check_in()
        self.settle()
        assert all(device.join() for device in devices)

    def run_to(self, phase: str, devices: Sequence[Device]) -> None:
        """Take a started round through all phases before `phase`."""
        for name in ANSWERED:
            if name == phase:
                break
            for device in devices:
                device.answer(name)
            self.settle()
        if devices[0].status().phase != phase:
            raise AssertionError(f"the round is in phase {devices[0].status()}, expected {phase}")


def make_bundle(
    folder: Path,
    signer: Ed25519PrivateKey,
    *,
    name: str = "tiny",
    strategy: str = "fedavg",
    min_cohort: int = 3,
    lineage: Lineage | None = None,
    policy: dict[str, Any] | None = None,
    not_after: int = 0,
) -> Path:
    """A bundle with parameters w [3, 2] and b [2], all zero. Its graphs have no nodes: the server runs none."""
    tensors = {"w": np.zeros((3, 2), np.float32), "b": np.zeros(2, np.float32)}
    w, b = {"dtype": "float32", "shape": (3, 2)}, {"dtype": "float32", "shape": (2,)}
    update = {"kind": "delta", "weighting": "examples", "range": DELTA_RANGE, "bits": 16, "clip": 100.0}
    finish = Program(
        kind="finish",
        file="finish.onnx",
        inputs=(
            Start(name="w.start", tensor="w", **w),
            Start(name="b.start", tensor="b", **b),
            Parameter(name="w", tensor="w", **w),
            Parameter(name="b", tensor="b", **b),
        ),
        outputs=(
            Update(name="w.update", tensor="w", **w, **update),
            Update(name="b.update", tensor="b", **b, **update),
            Update(
                name="weight", tensor="weight", dtype="float32", shape=(),
                kind="weight", weighting="examples", range=WEIGHT_RANGE, bits=16, lowest=1 / 64,
            ),
        ),
    )  # fmt: skip
    train = Program(
        kind="train",
        file="train.onnx",
        inputs=(
            Example(name="image", dtype="float32", shape=("batch", 3)),
            Parameter(name="w", tensor="w", **w),
            Parameter(name="b", tensor="b", **b),
            Hyperparameter(name="lr", dtype="float32", shape=(), default=0.1, minimum=0.0, maximum=1.0),
        ),
        outputs=(
            Parameter(name="w.new", tensor="w", **w),
            Parameter(name="b.new", tensor="b", **b),
        ),
    )
    data = (
        Example(name="image", dtype="float32", shape=("batch", 3)),
        Parameter(name="w", tensor="w", **w),
        Parameter(name="b", tensor="b", **b),
    )
    metrics = (
        Metric(name="loss", dtype="float32", shape=(), reduction="mean"),
        Metric(name="accuracy", dtype="float32", shape=(), reduction="mean"),
    )
    counted = {"kind": "value", "weighting": "uniform", "dtype": "float32", "range": 32767.0, "bits": 16}
    sums = tuple(
        Update(name=tensor, tensor=tensor, shape=shape, **counted)
        for tensor, shape in (("light/sum", ()), ("light/count", ()), ("hours/histogram", (4,)))
    )
    programs = {
        "train": train,
        "finish": finish,
        "evaluate": Program(kind="evaluate", file="evaluate.onnx", inputs=data, outputs=metrics),
        "look": Program(kind="analyze", file="look.onnx", inputs=data[:1], outputs=sums),
    }
    write_bundle(
        folder / name,
        name=name,
        programs=programs,
        graphs=dict.fromkeys((program.file for program in programs.values()), NO_NODES),
        statistics=(
            Statistic(name="light", kind="mean", program="look"),
            Statistic(
                name="hours", kind="quantiles", program="look", edges=(0.0, 10.0, 20.0), probabilities=(0.25, 0.5, 1.0)
            ),
        ),
        weights=write_weights(tensors),
        parameters=parameter_specs(tensors, ["w", "b"]),
        limits=Limits(peak_bytes=1 << 20, flops_per_example=100, upload_bytes=4 * LENGTH),
        privacy=PrivacyPolicy(
            modes=("secure", "plain"),
            min_cohort=min_cohort,
            threshold=0.6,
            max_clip=100.0,
            max_bits=16,
            **{"colluders": 0.0, "min_contributors": 1, "queries": 256, **(policy or {})},
        ),
        key=signer,
        schedule=(Phase(program="train", batch_size=8, epochs=1),),
        strategy=strategy,
        lineage=lineage or Lineage(),
        not_after=not_after,
    )
    file = folder / f"{name}.bundle"
    pack(folder / name, file)
    return file


@pytest.fixture
def bundle_maker() -> Callable[..., Path]:
    return make_bundle


@pytest.fixture
def device_maker() -> type[Device]:
    return Device


@pytest.fixture(scope="session")
def keys() -> Keys:
    return Keys()


@pytest.fixture(scope="session")
def bundle_file(keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(tmp_path_factory.mktemp("bundle"), keys.publisher)


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated database, to be copied: migrating takes longer than most tests."""
    path = tmp_path_factory.mktemp("database") / "archipel.db"
    database = Database(f"sqlite:///{path}")
    database.migrate()
    database.dispose()
    return path


@pytest.fixture
def data_folder(keys: Keys) -> Iterator[tuple[Path, str, Keys]]:
    with temporary_folder(keys) as made:
        yield made


@contextmanager
def temporary_folder(keys: Keys) -> Iterator[tuple[Path, str, Keys]]:
    """An initialised data folder, its operator token, the offline keys.

    In memory where the system has such a folder: most of a round's time is waiting for the disk to sync.
    """
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None, prefix="archipel-test-") as root:
        token = init_data_folder(
            Path(root) / "server",
            enrolment_key=public_bytes(keys.enrolment),
            publisher_keys=[public_bytes(keys.publisher)],
        )
        yield Path(root) / "server", token, keys


@pytest.fixture
def server_settings() -> dict[str, Any]:
    """Settings of `world` that are not the default; for tests to override."""
    return {}


NO_LIMITS = {"requests_per_second": 1e6, "anonymous_per_second": 1e6}
"""For tests that send whatever they can."""


def open_world(folder: Path, token: str, keys: Keys, bundle_file: Path, empty_database: Path, **changes: Any) -> World:
    """On an initialised data folder."""
    shutil.copy(empty_database, folder / "archipel.db")
    # Tests have a handful of devices; those of the smallest answer itself say what it is.
    settings = load_settings(folder, environment={}, **{"smallest_answer": 1, **changes})
    clock = Clock()
    services = Services.open(settings, clock=clock)
    services.prepare()
    return World(
        settings=settings,
        operator_token=token,
        keys=keys,
        clock=clock,
        services=services,
        bundle_file=bundle_file,
        app=create_app(settings, clock=clock),
        coordinator=Coordinator(services),
    )


def close_world(world: World) -> None:
    for services in (world.services, world.app.extensions["archipel"], world.coordinator._services):
        services.database.dispose()


@pytest.fixture
def world(
    data_folder: tuple[Path, str, Keys], bundle_file: Path, empty_database: Path, server_settings: dict[str, Any]
) -> Iterator[World]:
    made = open_world(*data_folder, bundle_file, empty_database, **server_settings)
    yield made
    close_world(made)
