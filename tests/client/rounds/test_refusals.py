"""Plans that a device must not carry out, from a server that is not what it should be."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel import bundle as b
from archipel.client import Agent
from archipel.protocol import messages as m
from archipel.protocol.identity import EnrolmentToken, mint_token, verify_chain
from archipel.protocol.problems import make_problem
from archipel.protocol.sealed import Sealed, decode, encode, public_bytes, seal
from tests.support.in_thread import in_thread

WEIGHTS = b.write_weights({"w": np.array([0.1, 0.2, 0.3], np.float32)})


class Rogue(ThreadingHTTPServer):
    """Speaks the protocol as far as the check-in, and gives whatever plan and files it was told to."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.key, self.enrolment_key = b.generate_key(), b.generate_key()
        self.plan: Sealed | None = None
        self.files: dict[str, bytes] = {}
        self.requests: list[str] = []

    def answer(self, path: str, body: bytes) -> tuple[int, bytes | msgspec.Struct]:
        self.requests.append(path)
        if path == "/v1/devices":
            chain = decode("enrolment", body, m.EnrolmentRequest).chain
            device = verify_chain(chain, public_bytes(self.enrolment_key))
            return 200, m.EnrolmentResponse(device_id=device.device_id)
        if path == "/v1/challenges":
            return 200, m.Challenge(nonce=secrets.token_bytes(32), expires=0.0)
        if path == "/v1/sessions":
            return 200, m.SessionResponse(token="t", expires=0.0)
        if path == "/v1/check-ins":
            return 200, m.CheckInResponse(plan=self.plan, retry_after=0.01)
        if path in self.files:
            return 200, self.files[path]
        return 404, make_problem(404, "no such thing", "1")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Rogue

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        status, message = self.server.answer(self.path, body)
        data = message if isinstance(message, bytes) else encode(message)
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PUT = do_POST = _answer

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def rogue() -> Iterator[Rogue]:
    with in_thread(Rogue()) as server:
        yield server


@pytest.fixture
def publisher() -> Ed25519PrivateKey:
    return b.generate_key()


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    return {"folder": tmp_path / "device", "backoff": 0.01, "attempts": 2}


@pytest.fixture
def agent(rogue: Rogue, publisher: Ed25519PrivateKey, config: dict[str, Any]) -> Iterator[Agent]:
    from archipel.client import AgentConfig

    seed = secrets.token_bytes(32)
    token = EnrolmentToken(
        server=f"http://127.0.0.1:{rogue.server_port}",
        server_key=public_bytes(rogue.key),
        enrolment_key=public_bytes(rogue.enrolment_key),
        publisher_keys=[public_bytes(publisher)],
        population="pupils",
        seed=seed,
        certificate=mint_token(rogue.enrolment_key, population="pupils", not_after=2**40, seed=seed),
    )

    def examples() -> dict[str, np.ndarray]:
        return {"x": np.ones((5, 3), np.float32), "y": np.zeros(5, np.float32)}

    with Agent(AgentConfig(**config), examples=examples) as made:
        made.enrol(token)
        yield made


@pytest.fixture
def plan(rogue: Rogue, publisher: Ed25519PrivateKey, bundle_maker: Callable[..., Path]) -> m.RoundPlan:
    """A plan that is all right, and the files that it needs."""
    file: Path = bundle_maker(publisher)
    digest = b.open_bundle(file, [public_bytes(publisher)]).digest
    weights = hashlib.sha256(WEIGHTS).hexdigest()
    rogue.files = {f"/v1/bundles/{digest}": file.read_bytes(), f"/v1/blobs/{weights}": WEIGHTS}
    return m.RoundPlan(
        round_id="a" * 32,
        task_id="b" * 32,
        number=1,
        bundle=digest,
        weights=weights,
        privacy="secure",
        min_cohort=3,
        max_cohort=4,
        threshold=3,
        modulus_bits=32,
        not_after=2**40,
    )


def refused(agent: Agent, rogue: Rogue, plan: m.RoundPlan, key: Ed25519PrivateKey | None = None) -> str:
    rogue.plan = seal("plan", plan, key or rogue.key)
    outcome = agent.run_once()
    assert outcome.kind == "refused", outcome
    # Nothing about the round left the device but that it leaves; of a plan that nobody signed not even that.
    sent = [path for path in rogue.requests if path.startswith("/v1/rounds")]
    assert sent == ([f"/v1/rounds/{plan.round_id}/leave"] if key is None else [])
    return outcome.reason


@pytest.mark.sampled(every=3)
def test_the_plan_itself_is_carried_out(agent: Agent, rogue: Rogue, plan: m.RoundPlan) -> None:
    rogue.plan = seal("plan", plan, rogue.key)
    outcome = agent.run_once()
    # It got as far as sending its keys, which this server does not know how to take.
    assert outcome.kind == "dropped"
    assert "no such thing" in outcome.reason
    assert [path for path in rogue.requests if path.startswith("/v1/rounds")] == [
        f"/v1/rounds/{'a' * 32}/advertisement"
    ]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"min_cohort": 2}, "min_cohort 2 is below the policy's 3"),
        ({"threshold": 2}, "below the policy's ratio"),
        ({"max_cohort": 8}, "below the policy's ratio"),
        ({"modulus_bits": 16}, "can overflow"),
        ({"privacy": "plain"}, "secure rounds only"),
        ({"hyperparameters": {"lr": 5.0}}, "'lr' must be from 0 to 1, got 5"),
        ({"hyperparameters": {"mu": 0.1}}, "'mu' is not one of this bundle's"),
    ],
)
@pytest.mark.sampled(every=6)
def test_plans_outside_the_bundles_bounds(
    agent: Agent, rogue: Rogue, plan: m.RoundPlan, changes: dict[str, Any], text: str
) -> None:
    assert text in refused(agent, rogue, msgspec.structs.replace(plan, **changes))
    assert [entry.result for entry in agent.rounds] == ["refused"]
    assert agent.run_once().kind == "waiting"


def test_a_plan_that_another_key_signed(agent: Agent, rogue: Rogue, plan: m.RoundPlan) -> None:
    assert "does not verify" in refused(agent, rogue, plan, b.generate_key())
    assert agent.rounds == []


def test_a_statement_of_another_kind_as_plan(agent: Agent, rogue: Rogue, plan: m.RoundPlan) -> None:
    rogue.plan = seal("session", plan, rogue.key)
    assert "does not verify" in agent.run_once().reason
    rogue.plan = seal("plan", m.Survivors(devices=[]), rogue.key)
    assert agent.run_once().kind == "refused"


def test_a_bundle_of_another_publisher(
    agent: Agent, rogue: Rogue, plan: m.RoundPlan, bundle_maker: Callable[..., Path]
) -> None:
    other = b.generate_key()
    file: Path = bundle_maker(other)
    digest = b.open_bundle(file, [public_bytes(other)]).digest
    rogue.files[f"/v1/bundles/{digest}"] = file.read_bytes()
    text = refused(agent, rogue, msgspec.structs.replace(plan, bundle=digest))
    assert "none of the 1 trusted keys signed this manifest" in text


def test_another_bundle_than_the_plans(
    agent: Agent, rogue: Rogue, plan: m.RoundPlan, bundle_maker: Callable[..., Path], publisher: Ed25519PrivateKey
) -> None:
    file: Path = bundle_maker(publisher, min_cohort=4)
    rogue.files[f"/v1/bundles/{plan.bundle}"] = file.read_bytes()
    assert f"asked for {plan.bundle}, the server sent" in refused(agent, rogue, plan)


def test_other_weights_than_the_plans(agent: Agent, rogue: Rogue, plan: m.RoundPlan) -> None:
    rogue.files[f"/v1/blobs/{plan.weights}"] = WEIGHTS[:-1] + b"\0"
    assert f"asked for {plan.weights}, the server sent" in refused(agent, rogue, plan)


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({"w": np.zeros(4, np.float32)}, "tensor 'w' is float32[4], expected float32[3]"),
        ({"w": np.zeros(3, np.float64)}, "tensor 'w' is float64[3], expected float32[3]"),
        ({"v": np.zeros(3, np.float32)}, "its tensors are ['v']..., expected ['w']..."),
        ({"w": np.zeros(3, np.float32), "v": np.zeros(3, np.float32)}, "its tensors are ['v', 'w']..., expected"),
        ({}, "its tensors are []..., expected ['w']..."),
    ],
)
@pytest.mark.sampled(every=6)
def test_weights_that_are_not_the_models(
    config: dict[str, Any], tensors: dict[str, np.ndarray], text: str, request: pytest.FixtureRequest
) -> None:
    """The server's log says that a plain round made them; this owner takes such weights."""
    config["allow_plain"] = True
    agent, rogue, plan = (request.getfixturevalue(name) for name in ("agent", "rogue", "plan"))
    data = b.write_weights(tensors)
    digest = hashlib.sha256(data).hexdigest()
    rogue.files[f"/v1/blobs/{digest}"] = data
    changed = msgspec.structs.replace(plan, weights=digest)
    assert "no such thing (HTTP 404" in refused(agent, rogue, changed)  # the server has no log

    log = f"/v1/populations/pupils/weights-log/{plan.bundle}?after=0"
    rogue.files[log] = encode(logged(rogue, plan, digest))
    rogue.requests.clear()
    changed = msgspec.structs.replace(changed, round_id="c" * 32, serial=1)
    assert text in refused(agent, rogue, changed)
    assert log in rogue.requests


def logged(rogue: Rogue, plan: m.RoundPlan, weights: str) -> m.WeightsLog:
    """A training that began with the plan's weights, and one plain round that made `weights` of them."""
    shared: dict[str, Any] = {"population": "pupils", "bundle": plan.bundle, "task_id": plan.task_id}
    start = m.WeightsStatement(number=1, previous="0" * 64, kind="start", weights=plan.weights, **shared)
    sealed = seal("weights", start, rogue.key)
    step = m.WeightsStatement(
        number=2, previous=hashlib.sha256(sealed.body).hexdigest(), kind="step", weights=weights, parent=plan.weights,
        round_id="d" * 32, plan="e" * 64, privacy="plain", devices=3, **shared,
    )  # fmt: skip
    return m.WeightsLog(entries=[sealed, seal("weights", step, rogue.key)], newest=2)


def test_a_damaged_bundle(agent: Agent, rogue: Rogue, plan: m.RoundPlan) -> None:
    whole = rogue.files[f"/v1/bundles/{plan.bundle}"]
    rogue.files[f"/v1/bundles/{plan.bundle}"] = whole[: len(whole) // 2]
    assert refused(agent, rogue, plan)


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        ({"max_peak_bytes": 1000}, r"up to 65536 bytes of memory, its owner allows 1000 (max_peak_bytes)"),
        ({"max_upload_bytes": 15}, r"up to 16 bytes of upload, its owner allows 15 (max_upload_bytes)"),
        ({"max_download_bytes": 100}, "the limit here is 100"),
    ],
)
def test_more_than_the_owner_allows(
    config: dict[str, Any], limit: dict[str, int], text: str, request: pytest.FixtureRequest
) -> None:
    config.update(limit)
    agent, rogue, plan = (request.getfixturevalue(name) for name in ("agent", "rogue", "plan"))
    assert text in refused(agent, rogue, plan)


def test_an_update_larger_than_declared(
    config: dict[str, Any],
    request: pytest.FixtureRequest,
    bundle_maker: Callable[..., Path],
    publisher: Ed25519PrivateKey,
) -> None:
    # The manifest's own limit says 1 byte, the vector has 16: what counts is what would be sent.
    config["max_upload_bytes"] = 15
    agent, rogue, plan = (request.getfixturevalue(name) for name in ("agent", "rogue", "plan"))
    file: Path = bundle_maker(publisher, limits={"upload_bytes": 1})
    digest = b.open_bundle(file, [public_bytes(publisher)]).digest
    rogue.files[f"/v1/bundles/{digest}"] = file.read_bytes()
    assert "16 bytes of upload" in refused(agent, rogue, msgspec.structs.replace(plan, bundle=digest))


def test_a_missing_file_is_a_round_that_is_left(agent: Agent, rogue: Rogue, plan: m.RoundPlan) -> None:
    rogue.files = {}
    rogue.plan = seal("plan", plan, rogue.key)
    assert agent.run_once().kind == "refused"
    assert agent.rounds[0].result == "refused"
