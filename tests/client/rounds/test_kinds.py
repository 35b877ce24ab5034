"""Real agents in every kind of task: plain, asynchronous, evaluation, analytics."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from archipel import bundle as b
from archipel.client import Agent, Outcome
from archipel.lite_runtime import Runtime
from archipel.protocol.operator.tasks import TaskInfo
from archipel.protocol.sealed import public_bytes
from tests.support.federation import Federation, round_seed

PLAIN = {"privacy": "plain", "threshold": None, "deadlines": {"assigning": 3.0, "updating": 5.0}}


@pytest.fixture
def plain(federation: Federation, bundle_maker: Callable[..., Path]) -> Federation:
    """A federation whose publisher allows plain rounds."""
    federation.bundle_file = bundle_maker(federation.publisher_key, modes=("secure", "plain"), min_cohort=2)
    return federation


def until_ended(federation: Federation, task: TaskInfo, agents: list[Agent]) -> TaskInfo:
    federation.run(agents, lambda: federation.operator.tasks.get(task.task_id).state != "running")
    return federation.operator.tasks.get(task.task_id)


def trained(federation: Federation, digest: str, agent: Agent, number: int) -> dict[str, np.ndarray]:
    """What this device must have uploaded, by the runtime itself."""
    folder = next(federation.folder.glob("other-*/"))
    runtime = Runtime(b.open_bundle(folder, [public_bytes(federation.publisher_key)]))
    return runtime.local_round(federation.data(number), seed=round_seed(agent.config.folder, digest)).arrays


@pytest.mark.sampled(every=4)
def test_a_plain_round_is_the_mean_in_floating_point(plain: Federation) -> None:
    agents = [plain.agent(number, allow_plain=True) for number in range(3)]
    task = plain.task(**PLAIN, cohort=3)
    done = until_ended(plain, task, agents)
    assert done.state == "completed", done
    [info] = plain.rounds(task)
    updates = [trained(plain, plain.plan_digest(info.round_id), agent, number) for number, agent in enumerate(agents)]
    weight = sum(float(each["weight"]) for each in updates)
    start = np.array([0.1, 0.2, 0.3], np.float32)
    expected = start + sum(each["dw"].astype(np.float64) for each in updates) / weight
    np.testing.assert_allclose(plain.operator.weights.read(done.model)["w"], expected, rtol=1e-6)
    for agent in agents:
        assert plain.names(agent)[-3:] == ["trained", "uploaded", "committed"]
        assert agent.rounds[-1].result == "took_part"


@pytest.mark.sampled(every=4)
def test_a_device_whose_owner_allows_secure_rounds_only_refuses(
    plain: Federation, outcome_of: Callable[[Agent, str], Outcome]
) -> None:
    agents = [plain.agent(number, allow_plain=number > 0) for number in range(3)]
    plain.task(**PLAIN, cohort=3, min_cohort=2)
    while (done := agents[0].run_once()).kind != "refused":
        for agent in agents[1:]:
            if agent.run_once().kind != "waiting":
                break
        time.sleep(0.02)
    assert "allow_plain" in done.reason


@pytest.mark.sampled(every=4)
def test_asynchronous_devices_work_on_without_waiting_for_each_other(plain: Federation) -> None:
    agents = [plain.agent(number, allow_plain=True) for number in range(4)]
    task = plain.task(
        privacy="plain", mode="asynchronous", threshold=None, min_cohort=2, cohort=2, concurrency=4, rounds=6
    )
    done = until_ended(plain, task, agents)
    assert (done.state, done.rounds_committed) == ("completed", 6)
    # Least squares by gradient steps: six versions later the loss is lower than at the start.
    w = plain.operator.weights.read(done.model)["w"]
    losses = []
    for weights in (np.array([0.1, 0.2, 0.3]), w):
        errors = [plain.data(n)["x"] @ weights - plain.data(n)["y"] for n in range(4)]
        losses.append(float(np.mean(np.concatenate(errors) ** 2)))
    assert losses[1] < 0.8 * losses[0]
    # Every update that counts was taken from a device that says so.
    taken = sum(entry.result == "took_part" for agent in agents for entry in agent.rounds)
    assert taken >= 12
    assert all(entry.result != "refused" for agent in agents for entry in agent.rounds)


@pytest.mark.sampled(every=8)
def test_secure_groups_take_turns(federation: Federation) -> None:
    agents = [federation.agent(number) for number in range(6)]
    task = federation.task(mode="asynchronous", cohort=3, threshold=3, concurrency=6, rounds=4)
    done = until_ended(federation, task, agents)
    assert (done.state, done.rounds_committed) == ("completed", 4)
    committed = [info for info in federation.rounds(task) if info.phase == "committed"]
    assert all(len(info.survivors) == 3 for info in committed)
    spans = sorted((info.started, info.ended) for info in committed)
    assert any(later[0] < earlier[1] for earlier, later in pairwise(spans)), "no two groups overlapped"


@pytest.mark.parametrize("privacy", ["secure", "plain"])
@pytest.mark.sampled(every=4)
def test_an_evaluation_is_that_of_all_examples_together(plain: Federation, privacy: str) -> None:
    agents = [plain.agent(number, allow_plain=True) for number in range(3)]
    task = plain.task(
        kind="evaluation", metrics={"mse": 64.0}, max_examples=100, privacy=privacy, threshold=None, cohort=3
    )
    done = until_ended(plain, task, agents)
    assert done.state == "completed", done
    [info] = plain.rounds(task)
    w = np.array([0.1, 0.2, 0.3])
    errors = np.concatenate([plain.data(n)["x"] @ w - plain.data(n)["y"] for n in range(3)])
    assert info.result.devices == 3
    assert info.result.examples == pytest.approx(len(errors), abs=0.01)
    assert info.result.metrics["mse"] == pytest.approx(np.mean(errors**2), rel=1e-3)


@pytest.mark.parametrize("privacy", ["secure", "plain"])
@pytest.mark.sampled(every=4)
def test_an_analysis_is_that_of_all_examples_together(plain: Federation, privacy: str) -> None:
    agents = [plain.agent(number, allow_plain=True) for number in range(3)]
    task = plain.task(kind="analytics", privacy=privacy, threshold=None, cohort=3)
    done = until_ended(plain, task, agents)
    assert done.state == "completed", done
    [info] = plain.rounds(task)
    y = np.concatenate([plain.data(n)["y"] for n in range(3)])
    statistics = info.result.statistics
    assert statistics["y"].value == pytest.approx(y.mean(), abs=1e-3)
    expected = [(y < -1).sum(), ((y >= -1) & (y < 0)).sum(), ((y >= 0) & (y < 1)).sum(), (y >= 1).sum()]
    assert statistics["spread"].counts == [float(each) for each in expected]
