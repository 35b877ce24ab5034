"""Rounds through a proxy that fails as it is told: each answer of the server has one next step, and sums stay right."""

from __future__ import annotations

import contextlib
import http.client
import random
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from archipel.client import Agent
from archipel.errors import RefusedError, UnreachableError

Fault = Callable[["_Handler", Callable[[], tuple[int, list[tuple[str, str]], bytes]]], None]


class Proxy(ThreadingHTTPServer):
    """Passes requests on. `fault(method, path)` says what happens to one instead, None: nothing."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = port
        self.fault: Callable[[str, str], Fault | None] = lambda method, path: None
        self.seen: list[tuple[str, str, int, bytes]] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def puts(self, path: str) -> list[bytes]:
        return [body for method, where, _, body in self.seen if method == "PUT" and where.endswith(path)]

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))

        def forward() -> tuple[int, list[tuple[str, str]], bytes]:
            connection = http.client.HTTPConnection("127.0.0.1", self.server.target, timeout=10)
            try:
                connection.request(self.command, self.path, body or None, dict(self.headers))
                response = connection.getresponse()
                result = response.status, response.getheaders(), response.read()
            finally:
                connection.close()
            with self.server.lock:
                self.server.seen.append((self.command, self.path, result[0], body))
            return result

        with self.server.lock:
            fault = self.server.fault(self.command, self.path)
        if fault is not None:
            fault(self, forward)
            self.close_connection = True
        else:
            self.answer(*forward())

    def answer(self, status: int, headers: list[tuple[str, str]], body: bytes, cut: int | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("connection", "transfer-encoding"):
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[:cut])

    do_GET = do_PUT = do_POST = _pass

    def log_message(self, *args: Any) -> None:
        pass


def status(code: int, **headers: str) -> Fault:
    def fault(handler: _Handler, forward: Any) -> None:
        body = b'{"type":"made up","message":"by the proxy","request_id":"1"}'
        more = [(name.replace("_", "-"), value) for name, value in headers.items()]
        handler.answer(code, [("Content-Length", str(len(body))), ("Connection", "close"), *more], body)

    return fault


def lost_request(handler: _Handler, forward: Any) -> None:
    handler.connection.close()


def lost_answer(handler: _Handler, forward: Any) -> None:
    forward()
    handler.connection.close()


def truncated(handler: _Handler, forward: Any) -> None:
    code, headers, body = forward()
    handler.answer(code, headers, body, cut=len(body) // 2)


def garbage(handler: _Handler, forward: Any) -> None:
    code, headers, body = forward()
    handler.answer(code, headers, bytes(255 - byte for byte in body))


def slow(handler: _Handler, forward: Any) -> None:
    code, headers, body = forward()
    time.sleep(0.1)
    handler.answer(code, headers, body)


MENDED: dict[str, Fault] = {
    "request lost": lost_request,
    "answer lost": lost_answer,
    "truncated": truncated,
    "garbage": garbage,
    "slow": slow,
    "429": status(429, Retry_After="0.05"),
    "503": status(503, Retry_After="0.05"),
    "401": status(401),
}
STEPS = (
    "PUT advertisement", "GET cohort", "PUT shares", "GET shares", "PUT update", "GET survivors", "PUT confirmation",
    "GET confirmations", "PUT unmasking",
)  # fmt: skip


@pytest.fixture
def proxy(federation: Any) -> Iterator[Proxy]:
    server = Proxy(federation.server.port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def run(federation: Any, proxy: Proxy, *, rounds: int = 1, **config: Any) -> tuple[Any, list[Agent]]:
    """Three devices, the first behind the proxy; until the task has ended."""
    options = {"read_timeout": 2.0, **config}
    agents = [federation.agent(0, server=proxy.url, **options), federation.agent(1), federation.agent(2)]
    task = federation.task(cohort=3, rounds=rounds)
    federation.run(agents, lambda: federation.operator.task(task.task_id).state != "running")
    return task, agents


def check_sum(federation: Any, task: Any, agents: list[Agent]) -> None:
    assert federation.operator.task(task.task_id).state == "completed"
    [info] = federation.rounds(task)
    assert len(info.survivors) == len(agents)
    expected = federation.expected_weights(
        federation.operator.weights(info.weights_in)["w"], list(zip(agents, range(len(agents)))), task
    )
    np.testing.assert_allclose(federation.operator.weights(info.weights_out)["w"], expected, rtol=1e-6)


@pytest.mark.parametrize("shift", [0, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3, 5, 6, 7))])
def test_every_step_survives_every_passing_fault(federation: Any, proxy: Proxy, shift: int) -> None:
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
def test_a_refusal_makes_the_device_leave(federation: Any, proxy: Proxy, code: int, step: str) -> None:
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
def test_a_phase_that_is_over_ends_the_part_not_always_the_round(
    federation: Any, proxy: Proxy, step: str, result: str
) -> None:
    """410 before the device's update counts: leave. After: the update is in the sum, and the result still matters."""
    method, path = step.split()
    proxy.fault = lambda m, p: status(410) if m == method and p.endswith(path) else None
    agents = [federation.agent(number) for number in (1, 2, 3)]
    late = federation.agent(0, server=proxy.url)
    task = federation.task(cohort=4, deadlines={"sharing": 0.6, "confirming": 0.6, "unmasking": 0.6})
    federation.run([late, *agents], lambda: federation.operator.task(task.task_id).state != "running")
    assert federation.operator.task(task.task_id).state == "completed"
    [info] = federation.rounds(task)
    assert (late.device_id in info.survivors) == (result == "took_part")
    assert late.rounds[0].result == result


def test_too_early_is_waited_out(federation: Any, proxy: Proxy) -> None:
    """The proxy claims that the phase has come before it has; the server says 409, and the device asks again."""
    early = {"left": 2}

    def pretend(method: str, path: str) -> Fault | None:
        if method == "GET" and len(path.rsplit("/", 1)[1]) == 32 and early["left"]:
            early["left"] -= 1
            return ahead
        return None

    def ahead(handler: _Handler, forward: Any) -> None:
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
    federation.run(agents, lambda: federation.operator.task(task.task_id).state != "running")
    assert any(code == 409 for _, path, code, _ in proxy.seen if path.endswith("/cohort"))
    check_sum(federation, task, agents)


def test_an_answer_of_this_device_that_differs_makes_it_leave(federation: Any, proxy: Proxy) -> None:
    proxy.fault = lambda m, p: status(409) if m == "PUT" and p.endswith("/shares") else None
    agents = [federation.agent(0, server=proxy.url), *(federation.agent(number) for number in (1, 2))]
    federation.task(cohort=3)
    federation.run(agents, lambda: "dropped" in federation.names(agents[0]))
    assert "HTTP 409" in agents[0].rounds[0].reason


def test_a_server_that_stays_away_is_left(federation: Any, proxy: Proxy) -> None:
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


def test_random_faults_never_spoil_a_sum(federation: Any, proxy: Proxy) -> None:
    rng = random.Random(7)
    faults = [fault for name, fault in MENDED.items() if name != "slow"]
    proxy.fault = lambda method, path: rng.choice(faults) if rng.random() < 0.25 else None
    agents = [federation.agent(number, enrol=False, server=proxy.url, attempts=5) for number in range(5)]
    for agent in agents:
        while not agent.device_id:
            with contextlib.suppress(RefusedError, UnreachableError):
                agent.enrol(federation.token())
    deadlines = {"advertising": 2.0, "sharing": 2.0, "masking": 2.0, "confirming": 2.0, "unmasking": 2.0}
    task = federation.task(cohort=5, min_cohort=3, threshold=3, deadlines=deadlines)
    federation.run(agents, lambda: federation.operator.task(task.task_id).state != "running", timeout=30)
    assert federation.operator.task(task.task_id).state == "completed"
    info = next(r for r in federation.rounds(task) if r.phase == "committed")
    survivors = [(agent, number) for number, agent in enumerate(agents) if agent.device_id in info.survivors]
    expected = federation.expected_weights(federation.operator.weights(info.weights_in)["w"], survivors, task)
    np.testing.assert_allclose(federation.operator.weights(info.weights_out)["w"], expected, rtol=1e-6)
    # And nobody is stuck: the next time the server can be asked, everything is settled.
    proxy.fault = lambda method, path: None
    for agent in agents:
        assert agent.run_once().kind == "waiting"
        assert {entry.step for entry in agent.rounds} <= {"closed"}
        own = [entry.result for entry in agent.rounds if entry.round_id == info.round_id]
        # Only what counted is taken for counted; a device that was cut off after its upload cannot know.
        assert own != ["took_part"] or agent.device_id in info.survivors
