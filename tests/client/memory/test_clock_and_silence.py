"""A clock that is years late changes nothing; one that is years ahead keeps the device out of rounds, and it says so;
days without a server are waited out, at a pace that spares batteries."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from archipel.client import Agent
from tests.support.federation import Federation

SKEWED = """
import json, sys, threading, time
shift, folder, token, data = json.loads(sys.argv[1])
real = time.time
time.time = lambda: real() + shift
from pathlib import Path
import numpy as np
from archipel.client import Agent, AgentConfig
from archipel.protocol.identity import EnrolmentToken
from archipel.protocol.sealed import decode
examples = {key: np.array(value, np.float32) for key, value in data.items()}
stop = threading.Event()
refused = []
def on_event(event):
    if event.name == "refused":
        refused.append(event.detail["reason"])
    if event.name in ("committed", "dropped", "refused"):
        stop.set()
config = AgentConfig(folder=Path(folder), backoff=0.02, isolated=False)
with Agent(config, examples=lambda: examples, on_event=on_event) as agent:
    agent.enrol(decode("enrolment token", token.encode(), EnrolmentToken))
    agent.run_forever(stop)
    print([entry.result for entry in agent.rounds], *refused)
"""


@pytest.mark.parametrize("years", [-20, 20])
@pytest.mark.sampled(every=8)
def test_a_clock_that_is_wrong_by_years(federation: Federation, years: int) -> None:
    """Plans are good for a day: one that is ahead of that takes each for an old one that somebody sends again."""
    from archipel.protocol.sealed import encode

    others = [federation.agent(number) for number in (1, 2)]
    task = federation.task(cohort=3)
    token = encode(federation.token()).decode()
    data = {name: array.tolist() for name, array in federation.data(0).items()}
    argument = json.dumps([years * 365 * 86400, str(federation.folder / "skewed"), token, data])
    told: list[str] = []

    def run() -> None:
        done = subprocess.run(
            [sys.executable, "-c", SKEWED, argument], check=False, capture_output=True, text=True, timeout=50
        )
        told.append(done.stdout + done.stderr)

    thread = threading.Thread(target=run)
    thread.start()
    federation.run(others, lambda: not thread.is_alive())
    thread.join()
    if years > 0:
        [line] = told
        assert line.startswith("[] the plan of round ")
        assert "is this device's clock right?" in line
        assert federation.operator.tasks.get(task.task_id).rounds_committed == 0
        return
    assert told == ["['took_part']\n"]
    assert federation.wait(task).state == "completed"


@pytest.mark.sampled(every=3)
def test_days_without_a_server_and_back(federation: Federation) -> None:
    """Waits grow to `max_offline_wait` and stay there; after the silence the next check-in is answered as ever."""
    agent = federation.agent(0, max_offline_wait=900.0, attempts=1, backoff=0.25)
    assert agent.run_once().kind == "waiting"
    federation.server.stop()
    waits: list[float] = []
    stop = threading.Event()

    class Days(threading.Event):
        """Time passes at once; after two days of it the server is back."""

        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            waits.append(timeout)
            if sum(waits) > 2 * 86400 and not back:
                federation.server.start()
                back.append(len(waits))
            if back and len(waits) > back[0] + 3:
                stop.set()
                self.set()
            return self.is_set()

    back: list[int] = []
    agent.run_forever(Days())
    growing, long, answered = waits[:12], waits[20 : back[0]], waits[back[0] :]
    assert all(later > earlier for earlier, later in zip(growing, growing[2:], strict=False))
    assert all(900 * 0.8 <= each <= 900 * 1.2 for each in long)
    # Devices that lost the server at one moment do not come back at one.
    assert len(set(long)) == len(long)
    assert all(each < 1 for each in answered)
    assert stop.is_set()
    agent.close()
    with Agent(agent.config, examples=dict) as again:
        assert again.run_once().kind == "waiting"
