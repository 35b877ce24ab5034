"""Agents whose check-ins the server keeps back until they are in a round."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from archipel.client import Agent
from archipel.protocol.messages import CheckIn
from tests.support.faults import Proxy, running, silent, status
from tests.support.federation import Federation, open_federation
from tests.support.patience import stretched

POLL = 3.0
"""Seconds after which devices check in again that are not kept waiting."""


@pytest.fixture
def slow(tmp_path: Path, server_host: str) -> Iterator[Federation]:
    """A federation whose devices check in rarely, also while there are rounds."""
    settings = {"retry_after": POLL, "check_in_window": 30.0, "check_ins_per_second": 1.0, "hold_seconds": 8.0}
    with open_federation(tmp_path, server_host, **settings) as made:
        yield made


@contextmanager
def at_work(*agents: Agent) -> Iterator[threading.Event]:
    stop = threading.Event()
    threads = [threading.Thread(target=agent.run_forever, args=(stop,)) for agent in agents]
    for thread in threads:
        thread.start()
    try:
        yield stop
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def until(what: Callable[[], bool], seconds: float = 15.0) -> float:
    """How long that took."""
    began = time.monotonic()
    while not what():
        assert time.monotonic() < began + stretched(seconds)
        time.sleep(0.01)
    return time.monotonic() - began


def held(federation: Federation) -> int:
    return len(federation.server._app.extensions["archipel"].held)


def assigned(federation: Federation) -> int:
    return sum(event.name == "assigned" for event in federation.events)


@pytest.mark.sampled(every=3)
def test_a_round_begins_at_once_without_polling(slow: Federation) -> None:
    agents = [slow.agent(number) for number in range(3)]
    slow.publish()
    with at_work(*agents) as stop:
        until(lambda: held(slow) == 3)
        slow.task(cohort=3)
        # Those that wait learn of it within a quarter of a second.
        assert until(lambda: assigned(slow) == 3) < stretched(2.0)
        began = time.monotonic()
        stop.set()
    assert time.monotonic() - began < stretched(3.0)


@pytest.mark.sampled(every=3)
def test_an_agent_that_waits_can_be_stopped(slow: Federation) -> None:
    agent = slow.agent(0)
    with at_work(agent) as stop:
        until(lambda: held(slow) == 1)
        began = time.monotonic()
        stop.set()
    assert time.monotonic() - began < stretched(2.0)
    # It is of use afterwards, and `run_once` does not wait.
    began = time.monotonic()
    assert agent.run_once().kind == "waiting"
    assert time.monotonic() - began < stretched(3.0)


def reports(proxy: Proxy) -> list[float]:
    """For how long each check-in was to be kept back at most."""
    told = [body for _, path, body in proxy.came if path == "/v1/check-ins"]
    return [msgspec.json.decode(body, type=CheckIn).wait for body in told]


@pytest.mark.sampled(every=4)
def test_a_connection_that_is_cut_off_is_the_end_of_waiting(slow: Federation) -> None:
    with running(Proxy(slow.server.port)) as proxy:
        agent = slow.agent(0, server=proxy.url)
        cut = silent(1.6)
        proxy.fault = lambda method, path: cut if path == "/v1/check-ins" and not reports(proxy)[1:] else None
        with at_work(agent):
            until(lambda: len(reports(proxy)) >= 2)
            first, second, *_ = reports(proxy)
            assert (first, second) == (20.0, 0.0)
            until(lambda: len(reports(proxy)) >= 3)
        # From now on it asks for less than it was cut off after.
        assert 1.0 <= reports(proxy)[2] < 0.9 * stretched(1.6)
        assert agent.run_once().kind == "waiting"


def test_a_gateway_that_gives_up_is_one_too(slow: Federation) -> None:
    with running(Proxy(slow.server.port)) as proxy:
        agent = slow.agent(0, server=proxy.url)
        proxy.fault = lambda method, path: status(504) if path == "/v1/check-ins" and len(reports(proxy)) == 1 else None
        with at_work(agent):
            until(lambda: len(reports(proxy)) >= 2)
        assert reports(proxy)[:2] == [20.0, 0.0]


def test_an_owner_may_not_want_to_wait(slow: Federation) -> None:
    with running(Proxy(slow.server.port)) as proxy, at_work(slow.agent(0, server=proxy.url, wait_seconds=0.0)):
        until(lambda: bool(reports(proxy)))
        assert reports(proxy) == [0.0]
        assert held(slow) == 0
