"""Somebody with a token asks a population the same question again and again, each time without one of the devices.

The differences of the sums are what single devices sent: with four devices and every three of them that is all four
histograms, exactly. Stopped at several places, each tested by itself: operators may not ask questions at all; the
publisher's policy asks for twenty devices by default; the server takes only devices whose sums tell of enough of them
together with all sums before; and a device itself refuses to confirm a set that differs by a few from an earlier one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipel.bundle import PrivacyPolicy
from archipel.errors import RefusedError
from archipel.operator import OperatorClient
from archipel.protocol.operator.access import TokenRequest
from archipel.protocol.operator.tasks import RoundInfo
from archipel.server.rounds.machine import queries
from tests.support.federation import Federation
from tests.support.fixtures.federation import bundle_maker as bundle_maker
from tests.support.fixtures.federation import federation as federation
from tests.support.fixtures.federation import server_host as server_host

DEVICES = 4
ASK: dict[str, Any] = {"kind": "analytics", "threshold": None, "min_cohort": DEVICES - 1, "cohort": DEVICES - 1}
SMALL = {"min_cohort": 2, "min_contributors": DEVICES - 1, "queries": 256}


@pytest.fixture
def fleet(federation: Federation, bundle_maker: Callable[..., Path]) -> Federation:
    """A federation whose publisher allows sums of three devices, so that three of four can be asked at all."""
    federation.bundle_file = bundle_maker(federation.publisher_key, **SMALL)
    for number in range(DEVICES):
        federation.agent(number, attributes={"number": float(number)})
    return federation


def ask_without_each(fleet: Federation, times: int) -> list[RoundInfo]:
    """A task for all devices but one, for each of them so many times; what was released."""
    digest, tasks = fleet.publish(), []

    def ask_next() -> bool:
        if tasks:
            found = fleet.operator.tasks.get(tasks[-1].task_id)
            if found.state == "running" and "such as may be in one sum" not in found.waiting_for:
                return False
            fleet.operator.tasks.cancel(found.task_id)
        if len(tasks) == times * DEVICES:
            return True
        number = len(tasks) % DEVICES
        tasks.append(fleet.task(**ASK, bundle=digest, name=f"q{len(tasks)}", eligibility=f"number != {number}"))
        return False

    fleet.run(fleet.agents, ask_next)
    return [info for task in tasks for info in fleet.rounds(task) if info.phase == "committed"]


def exact_histograms(fleet: Federation, released: Sequence[RoundInfo]) -> dict[str, list[float]]:
    """Of which devices the released sums give the histogram: where a combination of the sets is one device alone."""
    ids = [agent.device_id for agent in fleet.agents]
    sets = np.array([[device in info.survivors for device in ids] for info in released], float)
    sums = np.array([info.result.statistics["spread"].counts for info in released if info.result])
    found = {}
    for place, device in enumerate(ids):
        alone = np.eye(len(ids))[place]
        factors = np.linalg.lstsq(sets.T, alone, rcond=None)[0]
        if np.allclose(factors @ sets, alone):
            found[device] = np.round(factors @ sums, 6).tolist()
    return found


def true_histogram(number: int, fleet: Federation) -> list[float]:
    y = fleet.data(number)["y"]
    return [float(each) for each in ((y < -1).sum(), ((y >= -1) & (y < 0)).sum(), ((y >= 0) & (y < 1)).sum(),
                                     (y >= 1).sum())]  # fmt: skip


@pytest.mark.sampled(every=8)
def test_the_attack_where_publisher_and_server_let_it(fleet: Federation, bundle_maker: Callable[..., Path]) -> None:
    """Without any rule it works: one device in each difference is enough for a policy of one contributor."""
    fleet.bundle_file = bundle_maker(fleet.publisher_key, **{**SMALL, "min_contributors": 1})
    found = exact_histograms(fleet, ask_without_each(fleet, 1))
    assert found == {agent.device_id: true_histogram(number, fleet) for number, agent in enumerate(fleet.agents)}


@pytest.mark.sampled(every=4)
def test_the_server_takes_only_sets_that_tell_of_enough_devices(fleet: Federation) -> None:
    released = ask_without_each(fleet, 2)
    # The other questions were not even begun.
    assert {each.round_id for each in released} == {e.round_id for e in fleet.events if e.name == "assigned"}
    # Each time the first question's devices: the others would have told of one alone.
    assert len(released) == 2
    assert released[0].survivors == released[1].survivors
    assert exact_histograms(fleet, released) == {}


@pytest.mark.sampled(every=8)
def test_devices_refuse_though_the_server_skips_its_rules(fleet: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "choose", lambda session, task, waiting, fewest, *, now: list(waiting))
    monkeypatch.setattr(queries, "conflict", lambda session, current, task, *, now: "")
    first = fleet.task(**{**ASK, "min_cohort": DEVICES, "cohort": DEVICES})
    fleet.run(fleet.agents, lambda: fleet.operator.tasks.get(first.task_id).state == "completed")
    second = fleet.task(**ASK, bundle=first.bundle, name="less-one", eligibility="number != 3")
    refused = [agent for number, agent in enumerate(fleet.agents) if number != 3]

    def all_refused() -> bool:
        fleet.end_rests()
        return all(any("differ by 1 from" in entry.reason for entry in agent.rounds) for agent in refused)

    fleet.run(fleet.agents, all_refused)
    fleet.operator.tasks.cancel(second.task_id)
    assert all(info.phase != "committed" for info in fleet.rounds(second))
    # The same set is no danger: it is confirmed again.
    third = fleet.task(**{**ASK, "min_cohort": DEVICES, "cohort": DEVICES}, bundle=first.bundle, name="same")
    fleet.run(fleet.agents, lambda: fleet.operator.tasks.get(third.task_id).state == "completed")


def test_by_default_twenty_devices_must_be_in_a_sum(fleet: Federation, bundle_maker: Callable[..., Path]) -> None:
    stated = {"modes": ("secure",), "min_cohort": 2, "threshold": 0.6, "max_clip": 2.0, "max_bits": 20}
    assert PrivacyPolicy(**stated).min_contributors == 20
    fleet.bundle_file = bundle_maker(fleet.publisher_key, min_contributors=20)
    with pytest.raises(RefusedError, match="below the plan's min_contributors 20"):
        fleet.task(**ASK)
    # Whoever asks may ask for more, not for less.
    with pytest.raises(RefusedError, match="min_contributors 3 is below the policy's 20"):
        fleet.task(**ASK, min_contributors=3)


@pytest.mark.sampled(every=3)
def test_an_operator_may_not_ask(fleet: Federation) -> None:
    token = fleet.operator.tokens.create(TokenRequest(name="shift", role="operator")).token
    operator, fleet.operator = fleet.operator, OperatorClient(fleet.url, token)
    try:
        fleet.publish()
        for more in ({}, {"kind": "evaluation", "metrics": {"mse": 64.0}}):
            with pytest.raises(RefusedError, match="needs the role analyst or admin"):
                fleet.task(**{**ASK, **more})
    finally:
        fleet.operator.close()
        fleet.operator = operator


@pytest.mark.sampled(every=4)
def test_nothing_is_released_of_too_few_contributors(fleet: Federation) -> None:
    """Four devices are in the sum, but only two have examples: what is released would tell of these."""
    agents = fleet.agents[:2] + [
        fleet.agent(number, examples=lambda: {"x": np.zeros((0, 3), np.float32), "y": np.zeros(0, np.float32)})
        for number in (20, 21)
    ]
    task = fleet.task(**{**ASK, "min_cohort": DEVICES, "cohort": DEVICES})
    fleet.run(agents, lambda: any(info.phase == "failed" for info in fleet.rounds(task)))
    fleet.operator.tasks.cancel(task.task_id)
    info = next(info for info in fleet.rounds(task) if info.phase == "failed")
    assert info.reason == (
        "aggregation: fewer than 3 of the devices had examples (min_contributors); nothing of their sum was kept"
    )
    assert (info.result, info.weight_sum) == (None, None)
    spool = fleet.folder / "server" / "blobs" / "spool" / info.round_id
    deadline = time.monotonic() + 5
    while spool.exists() and any(spool.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.sampled(every=8)
def test_a_population_is_asked_so_many_times(
    fleet: Federation, bundle_maker: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.bundle_file = bundle_maker(fleet.publisher_key, **{**SMALL, "queries": 2})
    agents = fleet.agents[: DEVICES - 1]
    with pytest.raises(RefusedError, match="rounds: 3; bundle 'linear' allows 2 queries in 30 days"):
        fleet.task(**ASK, rounds=3)
    first = fleet.task(**ASK, rounds=2)
    fleet.run(agents, lambda: fleet.operator.tasks.get(first.task_id).state == "completed")
    more = fleet.task(**ASK, bundle=first.bundle, name="more")
    assert "was asked 2 times in the last 30 days; the bundle allows 2 queries" in more.waiting_for
    until = time.monotonic() + 0.5
    fleet.run(agents, lambda: time.monotonic() > until)
    assert fleet.rounds(more) == []
    # The devices have counted, too, should the server forget how often it asked.
    monkeypatch.setattr(queries, "budget", lambda session, task, *, now: queries.Budget(0, 2, 30))

    def all_refused() -> bool:
        # A round ends with the first devices that leave it, so that the others refuse the next one.
        fleet.end_rests()
        return all("was in 2 evaluations and analyses" in agent.rounds[-1].reason for agent in agents)

    fleet.run(agents, lambda: all_refused() or any(each.phase == "committed" for each in fleet.rounds(more)))
    fleet.operator.tasks.cancel(more.task_id)
    assert all_refused()
