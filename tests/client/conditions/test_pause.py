"""The owner's pause, from another process, at any time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from archipel.client import Agent, Event, Outcome
from archipel.client.conditions.pause import PAUSE_FILE, pause, paused, resume
from archipel.errors import ClientError
from tests.support.federation import Federation


def test_until_it_is_over_or_taken_back(tmp_path: Path) -> None:
    assert paused(tmp_path) == ""
    pause(tmp_path)
    assert paused(tmp_path) == "paused by its owner"
    pause(tmp_path, 2_000_000_000.0)
    assert paused(tmp_path, lambda: 1_999_999_999.0).startswith("paused by its owner until 2033-05-1")
    assert paused(tmp_path, lambda: 2_000_000_000.0) == ""
    assert resume(tmp_path)
    assert not resume(tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ClientError, match="is it a device's folder"):
        pause(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"until": "soon"}', '{"until": 1, "more": 2}', "x" * 5000])
def test_a_file_that_cannot_be_read_pauses(tmp_path: Path, text: str) -> None:
    (tmp_path / PAUSE_FILE).write_text(text)
    assert "cannot be read" in paused(tmp_path)
    resume(tmp_path)
    assert paused(tmp_path) == ""


@pytest.mark.sampled(every=3)
def test_a_paused_device_does_nothing_until_it_is_resumed(
    federation: Federation, outcome_of: Callable[[Agent, str], Outcome]
) -> None:
    agent = federation.agent(0)
    pause(agent.config.folder)
    before = agent._transport
    outcome = agent.run_once()
    assert (outcome.kind, outcome.reason) == ("paused", "paused by its owner")
    assert agent._transport is before or agent._transport.traffic.requests == 0
    resume(agent.config.folder)
    assert agent.run_once().kind == "waiting"


@pytest.mark.sampled(every=8)
def test_a_pause_in_a_round_holds_it_up(federation: Federation) -> None:
    """Set while it trains, taken back a moment later: the round goes on with this device."""

    def on_event(event: Event) -> None:
        federation.events.append(event)
        if event.name == "trained":
            pause(agents[0].config.folder, time.time() + 0.3)

    agents = [federation.agent(0, on_event=on_event, resume_within=5.0)]
    agents += [federation.agent(number) for number in (1, 2)]
    task = federation.task(cohort=3)
    federation.run(agents, lambda: federation.operator.tasks.get(task.task_id).state != "running")
    assert federation.wait(task).state == "completed"
    names = federation.names(agents[0])
    assert names[names.index("trained") :][:3] == ["trained", "paused", "resumed"]
    assert names[-1] == "committed"
