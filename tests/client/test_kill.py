"""kill -9 at every step of a round: the device goes on or leaves cleanly, and what was summed is right."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

from archipel.client import Agent
from archipel.server.models import Answer

VICTIM = """
import json, os, signal, sys, threading
from pathlib import Path
import numpy as np
from archipel.client import Agent, AgentConfig
from archipel.client.journal import OpenRound

folder, point, data = json.loads(sys.argv[1])
where, name = point.split()

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def on_event(event):
    if where == "event" and event.name == name:
        die()

advance = OpenRound.advance

def advance_and_die(self, step, **changes):
    advance(self, step, **changes)
    if where == "journal" and step == name:
        die()

OpenRound.advance = advance_and_die
examples = {key: np.array(value, np.float32) for key, value in data.items()}
config = AgentConfig(folder=Path(folder), backoff=0.02, isolated=False)
with Agent(config, examples=lambda: examples, on_event=on_event) as agent:
    agent.run_forever(threading.Event())
"""

# Where it dies -> is its update in the sum?, what its journal says in the end.
POINTS = {
    "event trained": (True, "took_part"),
    "journal advertising": (False, "dropped"),
    "event advertised": (False, "dropped"),
    "journal sharing": (False, "dropped"),
    "event shared": (False, "dropped"),
    # The masked bytes are on disk: the next process sends these, and only these.
    "journal masked": (True, "dropped"),
    "event uploaded": (True, "dropped"),
    # From here on the device knows that it counted, and learns the result afterwards.
    "journal confirming": (True, "took_part"),
    "event confirmed": (True, "took_part"),
    "journal unmasking": (True, "took_part"),
    "event unmasked": (True, "took_part"),
}
QUICK = ("event shared", "journal masked", "journal unmasking")


@pytest.mark.parametrize(
    "point", [point if point in QUICK else pytest.param(point, marks=pytest.mark.slow) for point in POINTS]
)
def test_killed_at(federation: Any, point: str) -> None:
    counted, result = POINTS[point]
    victim = federation.agent(0)
    victim.close()
    data = {name: array.tolist() for name, array in federation.data(0).items()}
    argument = json.dumps([str(victim.config.folder), point, data])
    others = [federation.agent(number) for number in (1, 2, 3)]
    deadlines = {"sharing": 1.0, "masking": 1.0, "confirming": 1.0, "unmasking": 1.0, "advertising": 4.0}
    task = federation.task(cohort=4, deadlines=deadlines)
    revived: list[Agent] = []
    stop = threading.Event()

    def die_and_rise() -> None:
        process = subprocess.run([sys.executable, "-c", VICTIM, argument], check=False, timeout=20)
        assert process.returncode == -9
        revived.append(Agent(victim.config, examples=lambda: federation.data(0)))
        revived[0].run_forever(stop)

    def over() -> bool:
        return (
            federation.operator.task(task.task_id).state != "running"
            and bool(revived)
            and all(entry.step == "closed" for entry in revived[0].rounds)
        )

    thread = threading.Thread(target=die_and_rise)
    thread.start()
    try:
        # The victim takes longest to start; the round begins with all four.
        while federation.operator.task(task.task_id).waiting == 0 and thread.is_alive():
            time.sleep(0.02)
        federation.run(others, over)
    finally:
        stop.set()
        thread.join()
    [again] = revived
    again.close()
    assert federation.operator.task(task.task_id).state == "completed"
    [info] = federation.rounds(task)
    assert (victim.device_id in info.survivors) == counted
    [entry] = again.rounds
    assert (entry.result, entry.step) == (result, "closed")
    check_sum(federation, task, info, [victim, *others])
    check_upload(federation, info, entry, counted)
    # State that lives on the device moved on exactly if the device knows that its update counted: 2 epochs of 2 steps.
    seen = [float(kept.state["seen"]) for kept in federation.states(victim.config.folder)]
    assert seen == ([4.0] if result == "took_part" else [])
    assert not [path.name for path in (victim.config.folder / "rounds").iterdir() if path.suffix != ".json"]


def check_sum(federation: Any, task: Any, info: Any, agents: list[Agent]) -> None:
    survivors = [(agent, number) for number, agent in enumerate(agents) if agent.device_id in info.survivors]
    expected = federation.expected_weights(federation.operator.weights(info.weights_in)["w"], survivors, task)
    np.testing.assert_allclose(federation.operator.weights(info.weights_out)["w"], expected, rtol=1e-6)


def check_upload(federation: Any, info: Any, entry: Any, counted: bool) -> None:
    """What the server got is what the journal had stored before it was sent."""
    query = select(Answer.digest).where(
        Answer.round_id == info.round_id, Answer.device_id == federation.agents[0].device_id, Answer.phase == "masking"
    )
    with federation.server._services.database.read() as session:
        assert list(session.scalars(query)) == ([entry.masked] if counted else [])
