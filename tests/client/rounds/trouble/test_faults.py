"""Rounds through a proxy that fails as it is told: each answer of the server has one next step, and sums stay right."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from archipel.client import Agent
from archipel.errors import RefusedError, UnreachableError
from archipel.protocol.operator.tasks import TaskInfo
from tests.support.faults import MENDED, Fault, Forward, Handler, Proxy, lost_request, running, status, twice
from tests.support.federation import Federation

STEPS = (
    "PUT advertisement", "GET cohort", "PUT shares", "GET shares", "PUT complaints", "PUT update", "GET survivors",
    "PUT confirmation", "GET confirmations", "PUT unmasking",
)  # fmt: skip


@pytest.fixture
def proxy(federation: Federation) -> Iterator[Proxy]:
    with running(Proxy(federation.server.port)) as made:
        yield made


def run(federation: Federation, proxy: Proxy, *, rounds: int = 1, **config: Any) -> tuple[TaskInfo, list[Agent]]:
    """Three devices, the first behind the proxy; until the task has ended."""
    options = {"read_timeout": 2.0, **config}
    agents = [federation.agent(0, server=proxy.url, **options), federation.agent(1), federation.agent(2)]
    task = federation.task(cohort=3, rounds=rounds)
    federation.run(agents, lambda: federation.operator.tasks.get(task.task_id).state != "running")
    return task, agents


def check_sum(federation: Federation, task: TaskInfo, agents: list[Agent]) -> None:
    assert federation.operator.tasks.get(task.task_id).state == "completed"
    [info] = federation.rounds(task)
    assert len(info.survivors) == len(agents)
    expected = federation.expected_weights(
        federation.operator.weights.read(info.weights_in)["w"], list(zip(agents, range(len(agents)))), task
    )
    np.testing.assert_allclose(federation.operator.weights.read(info.weights_out)["w"], expected, rtol=1e-6)


@pytest.mark.parametrize(
    "shift",
    [
        number if number in (0, len(STEPS)) else pytest.param(number, marks=pytest.mark.slow)
        for number in range(len(MENDED))
    ],
)
@pytest.mark.sampled(every=8)
def test_every_step_survives_every_passing_fault(federation: Federation, proxy: Proxy, shift: int) -> None:
    """Each step meets one fault; over all shifts each step meets each fault."""
    faults = list(MENDED.values())
    left = {tuple(step.split()): faults[(number + shift) % len(faults)] for number, step in enumerate(STEPS)}

    def once(method: str, path: str) -> Fault | None:
        return left.pop((method, path.rsplit("/", 1)[1]), None)

    proxy.fault = once
    task, agents = run(federation, proxy)
    assert not left
    check_sum(federation, task, agents)
    # Whatever was sent again was the same, byte for byte.
    for path in ("/advertisement", "/shares", "/update", "/confirmation", "/unmasking"):
        assert len(set(proxy.puts(path))) == 1
    assert agents[0].rounds[0].result == "took_part"


@pytest.mark.parametrize(
    ("code", "step"),
    [
        (400, "PUT shares"), (403, "GET cohort"), (404, "GET survivors"), (411, "PUT update"), (413, "PUT update"),
        (415, "PUT update"), (422, "PUT shares"),
    ],
)  # fmt: skip
@pytest.mark.sampled(every=6)
def test_a_refusal_makes_the_device_leave(federation: Federation, proxy: Proxy, code: int, step: str) -> None:
    method, path = step.split()
    proxy.fault = lambda m, p: status(code) if m == method and p.endswith(path) else None
    agents = [federation.agent(0, server=proxy.url), *(federation.agent(number) for number in (1, 2))]
    federation.task(cohort=3)
    federation.run(agents, lambda: "dropped" in federation.names(agents[0]))
    [entry] = agents[0].rounds
    assert entry.result == "dropped"
    assert f"HTTP {code}" in entry.reason
    # It does not come back to that round.
    assert agents[0].run_once().kind == "waiting"


@pytest.mark.parametrize(("step", "result"), [("PUT shares", "dropped"), ("PUT confirmation", "took_part")])
@pytest.mark.sampled(every=8)
def test_a_phase_that_is_over_ends_the_part_not_always_the_round(
    federation: Federation, proxy: Proxy, step: str, result: str
) -> None:
    """410 before the device's update counts: leave. After: the update is in the sum, and the result still matters."""
    method, path = step.split()
    proxy.fault = lambda m, p: status(410) if m == method and p.endswith(path) else None
    agents = [federation.agent(number) for number in (1, 2, 3)]
    late = federation.agent(0, server=proxy.url)
    task = federation.task(cohort=4, deadlines={"sharing": 1.5, "confirming": 1.5, "unmasking": 1.5})
    federation.run([late, *agents], lambda: federation.operator.tasks.get(task.task_id).state != "running")
    assert federation.operator.tasks.get(task.task_id).state == "completed"
    [info] = federation.rounds(task)
    assert (late.device_id in info.survivors) == (result == "took_part")
    assert late.rounds[0].result == result


@pytest.mark.sampled(every=4)
def test_too_early_is_waited_out(federation: Federation, proxy: Proxy) -> None:
    """The proxy claims that the phase has come before it has; the server says 409, and the device asks again."""
    early = {"left": 2}

    def pretend(method: str, path: str) -> Fault | None:
        if method == "GET" and len(path.rsplit("/", 1)[1]) == 32 and early["left"]:
            early["left"] -= 1
            return ahead
        return None

    def ahead(handler: Handler, forward: Forward) -> None:
        code, headers, body = forward()
        body = body.replace(b'"advertising"', b'"sharing"')
        headers = [(name, value) for name, value in headers if name.lower() != "content-length"]
        handler.answer(code, [*headers, ("Content-Length", str(len(body)))], body)

    def slowly() -> dict[str, np.ndarray]:
        time.sleep(0.4)
        data: dict[str, np.ndarray] = federation.data(1)
        return data

    proxy.fault = pretend
    agents = [federation.agent(0, server=proxy.url), federation.agent(1, examples=slowly), federation.agent(2)]
    task = federation.task(cohort=3)
    federation.run(agents, lambda: federation.operator.tasks.get(task.task_id).state != "running")
    assert any(code == 409 for _, path, code, _ in proxy.seen if path.endswith("/cohort"))
    check_sum(federation, task, agents)


@pytest.mark.sampled(every=8)
def test_an_answer_of_this_device_that_differs_makes_it_leave(federation: Federation, proxy: Proxy) -> None:
    proxy.fault = lambda m, p: status(409) if m == "PUT" and p.endswith("/shares") else None
    agents = [federation.agent(0, server=proxy.url), *(federation.agent(number) for number in (1, 2))]
    federation.task(cohort=3)
    federation.run(agents, lambda: "dropped" in federation.names(agents[0]))
    assert "HTTP 409" in agents[0].rounds[0].reason


@pytest.mark.sampled(every=4)
def test_a_server_that_stays_away_is_left(federation: Federation, proxy: Proxy) -> None:
    """After `patience` the device gives the round up, and the agent goes on polling."""
    dead = threading.Event()

    def fault(method: str, path: str) -> Fault | None:
        if method == "PUT" and path.endswith("/shares"):
            dead.set()
        return lost_request if dead.is_set() else None

    proxy.fault = fault
    agents = [federation.agent(0, server=proxy.url, patience=0.3), *(federation.agent(number) for number in (1, 2))]
    federation.task(cohort=3)
    federation.run(agents, lambda: "dropped" in federation.names(agents[0]))
    [entry] = agents[0].rounds
    assert "failed" in entry.reason
    dead.clear()
    proxy.fault = lambda method, path: None
    assert agents[0].run_once().kind == "waiting"


@pytest.mark.sampled(every=8)
def test_random_faults_never_spoil_a_sum(federation: Federation, proxy: Proxy) -> None:
    rng = random.Random(7)
    faults = [fault for name, fault in MENDED.items() if name != "slow"]
    proxy.fault = lambda method, path: rng.choice(faults) if rng.random() < 0.25 else None
    agents = [federation.agent(number, enrol=False, server=proxy.url, attempts=5) for number in range(5)]
    for agent in agents:
        while not agent.device_id:
            with contextlib.suppress(RefusedError, UnreachableError):
                agent.enrol(federation.token())
    deadlines = {
        "advertising": 2.0,
        "sharing": 2.0,
        "complaining": 2.0,
        "masking": 2.0,
        "confirming": 2.0,
        "unmasking": 2.0,
    }
    task = federation.task(cohort=5, min_cohort=3, threshold=3, deadlines=deadlines)
    federation.run(agents, lambda: federation.operator.tasks.get(task.task_id).state != "running", timeout=30)
    assert federation.operator.tasks.get(task.task_id).state == "completed"
    info = next(r for r in federation.rounds(task) if r.phase == "committed")
    survivors = [(agent, number) for number, agent in enumerate(agents) if agent.device_id in info.survivors]
    expected = federation.expected_weights(federation.operator.weights.read(info.weights_in)["w"], survivors, task)
    np.testing.assert_allclose(federation.operator.weights.read(info.weights_out)["w"], expected, rtol=1e-6)
    # And nobody is stuck: the next time the server can be asked, everything is settled.
    proxy.fault = lambda method, path: None
    for agent in agents:
        assert agent.run_once().kind == "waiting"
        assert {entry.step for entry in agent.rounds} <= {"closed"}
        own = [entry.result for entry in agent.rounds if entry.round_id == info.round_id]
        # Only what counted is taken for counted; a device that was cut off after its upload cannot know.
        assert own != ["took_part"] or agent.device_id in info.survivors


@pytest.mark.sampled(every=3)
def test_a_proof_that_is_delivered_twice_is_made_anew(federation: Federation, proxy: Proxy) -> None:
    """The second delivery is refused: its nonce was used by the first."""
    left = [twice, twice]
    proxy.fault = lambda method, path: left.pop() if path == "/v1/sessions" and left else None
    agent = federation.agent(0, server=proxy.url)
    assert agent.run_once().kind == "waiting"
    assert [code for _, path, code, _ in proxy.seen if path == "/v1/sessions"] == [200, 403, 200, 403, 200]
