"""Rounds whose graphs run in a child process: the same sums, and the owner's limits enforced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from archipel.lite_runtime import IsolatedRuntime, LocalUpdate
from archipel.protocol.operator.tasks import TaskInfo
from tests.support.federation import Federation

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="child processes with limits need Linux")
ALL_COME = {"advertising": 30.0}
"""A round that nobody misses ends early, and on a busy machine a child takes seconds to start."""


def over(federation: Federation, task: TaskInfo) -> Callable[[], bool]:
    return lambda: federation.operator.tasks.get(task.task_id).state != "running"


@pytest.mark.sampled(every=4)
def test_the_sum_and_what_is_remembered_are_those_of_a_round_in_one_process(federation: Federation) -> None:
    agents = [federation.agent(number, isolated=True) for number in range(3)]
    task = federation.task(cohort=3, rounds=2, deadlines=ALL_COME)
    federation.run(agents, over(federation, task), timeout=60)
    assert federation.wait(task).state == "completed"
    last = max(federation.rounds(task), key=lambda info: info.number)
    start = federation.operator.weights.read(last.weights_in)["w"]
    expected = federation.expected_weights(start, [(agent, n) for n, agent in enumerate(agents)], task)
    np.testing.assert_allclose(federation.operator.weights.read(last.weights_out)["w"], expected, rtol=1e-6)
    # Two rounds of two epochs, each of 5 examples in batches of 4.
    assert [float(kept.state["seen"]) for kept in federation.states(agents[0].config.folder)] == [8.0]


@pytest.mark.parametrize("kind", ["evaluation", "analytics"])
@pytest.mark.sampled(every=8)
def test_other_kinds_of_rounds(federation: Federation, kind: str) -> None:
    agents = [federation.agent(number, isolated=True) for number in range(3)]
    more: dict[str, Any] = {"metrics": {"mse": 64.0}, "max_examples": 100} if kind == "evaluation" else {}
    task = federation.task(kind=kind, cohort=3, threshold=None, deadlines=ALL_COME, **more)
    federation.run(agents, over(federation, task), timeout=60)
    assert federation.wait(task).state == "completed"
    [info] = federation.rounds(task)
    data = [federation.data(number) for number in range(3)]
    y = np.concatenate([fields["y"] for fields in data])
    if kind == "evaluation":
        w = federation.operator.weights.read(info.weights_in)["w"]
        errors = np.concatenate([(fields["x"] @ w - fields["y"]) ** 2 for fields in data])
        assert info.result.metrics["mse"] == pytest.approx(float(errors.mean()), rel=1e-2)
    else:
        assert info.result.statistics["y"].value == pytest.approx(float(y.mean()), rel=1e-2)


@pytest.mark.sampled(every=8)
def test_an_agent_that_waits_has_loaded_no_graph_runtime(federation: Federation) -> None:
    """In a process of its own, through a round: ONNX Runtime is in the child alone, and that is gone afterwards."""
    agent = federation.agent(0)
    agent.close()
    others = [federation.agent(number) for number in (1, 2)]
    program = """
import json, sys, threading
from pathlib import Path
import numpy as np
from archipel.client import Agent, AgentConfig
folder, data = json.loads(sys.argv[1])
examples = {key: np.array(value, np.float32) for key, value in data.items()}
stop = threading.Event()
events = []
def on_event(event):
    events.append(event.name)
    if event.name == "committed":
        stop.set()
with Agent(AgentConfig(folder=Path(folder), backoff=0.02), examples=lambda: examples, on_event=on_event) as agent:
    agent.run_forever(stop)
children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
print(json.dumps([events[-1], "onnxruntime" in sys.modules, children]))
"""
    argument = json.dumps([str(agent.config.folder), {k: v.tolist() for k, v in federation.data(0).items()}])
    task = federation.task(cohort=3, deadlines=ALL_COME)
    found: list[str] = []

    def run() -> None:
        done = subprocess.run(
            [sys.executable, "-c", program, argument], check=False, capture_output=True, text=True, timeout=60
        )
        found.append(done.stdout or done.stderr)

    thread = threading.Thread(target=run)
    thread.start()
    federation.run(others, lambda: over(federation, task)() and not thread.is_alive())
    thread.join()
    assert json.loads(found[0]) == ["committed", False, []]


@pytest.mark.sampled(every=4)
def test_a_step_that_takes_too_long_is_refused_and_the_agent_goes_on(federation: Federation) -> None:
    agent = federation.agent(0, isolated=True, max_step_seconds=0.000_001)
    others = [federation.agent(number) for number in (1, 2, 3)]
    task = federation.task(cohort=4, deadlines={"advertising": 2.0})
    federation.run([agent, *others], over(federation, task))
    assert federation.wait(task).state == "completed"
    [entry] = agent.rounds
    assert entry.result == "refused"
    assert "seconds allowed" in entry.reason
    assert agent.run_once().kind == "waiting"


@pytest.mark.sampled(every=8)
def test_a_child_that_dies_costs_the_round_and_nothing_else(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = IsolatedRuntime.local_round

    def killed(self: IsolatedRuntime, *arguments: Any, **options: Any) -> LocalUpdate:
        def kill(progress: object) -> None:
            assert self.pid is not None
            os.kill(self.pid, signal.SIGKILL)

        return kept(self, *arguments, **{**options, "callbacks": [kill]})

    agent = federation.agent(0, isolated=True)
    others = [federation.agent(number) for number in (1, 2, 3)]
    monkeypatch.setattr(IsolatedRuntime, "local_round", killed)
    task = federation.task(cohort=4, deadlines={"advertising": 2.0})
    federation.run([agent, *others], over(federation, task))
    assert federation.wait(task).state == "completed"
    [entry] = agent.rounds
    assert entry.result == "refused"
    monkeypatch.undo()
    federation.end_rests()
    again = federation.task(name="again", cohort=4)
    federation.run([agent, *others], over(federation, again))
    assert [entry.result for entry in agent.rounds] == ["refused", "took_part"]


@pytest.mark.sampled(every=8)
def test_conditions_that_end_hold_the_child_between_two_steps(federation: Federation) -> None:
    """More examples, so that there are many steps; the device is unwilling for a while in the middle of them."""
    many = {name: np.concatenate([array] * 1000) for name, array in federation.data(0).items()}
    since: list[float] = []

    def conditions() -> str:
        if not agent.rounds:
            return ""
        since.append(time.monotonic())
        # The question before training, one in the middle of it, and those after.
        return "not charging" if 2 <= len(since) < 5 else ""

    agent = federation.agent(0, isolated=True, examples=lambda: many, conditions=conditions, resume_within=5.0)
    others = [federation.agent(number) for number in (1, 2)]
    deadlines = {"advertising": 30.0, "sharing": 10.0, "masking": 10.0}
    task = federation.task(cohort=3, deadlines=deadlines)
    federation.run([agent, *others], over(federation, task), timeout=60)
    assert federation.wait(task).state == "completed"
    names = federation.names(agent)
    assert names[:5] == ["enrolled", "assigned", "paused", "resumed", "trained"]
    assert agent.rounds[0].steps == 2 * 1250
