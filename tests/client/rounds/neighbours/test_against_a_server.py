"""Rounds over neighbours of real agents against a real server, one of which is killed and started again in between."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipel.client import Event
from tests.client.answers.world import Killed
from tests.support.federation import Federation

COUNT = 8
LONG = dict.fromkeys(("assigning", "advertising", "sharing", "complaining", "masking", "confirming", "unmasking"), 20.0)


class Mortal:
    """An agent that is killed once at an event, as `kill -9` does: what its disk had then is what the next one gets."""

    def __init__(self, federation: Federation, number: int, event: str) -> None:
        self._federation, self._number, self._event = federation, number, event
        self.agent = federation.agent(number, on_event=self._on_event)
        self.killed = False

    @property
    def device_id(self) -> str:
        return self.agent.device_id

    def run_forever(self, stop: threading.Event) -> None:
        try:
            self.agent.run_forever(stop)
        except Killed:
            folder = self.agent.config.folder
            self.agent.close()
            shutil.rmtree(folder)
            self._copy.rename(folder)
            self.agent = self._federation.agent(self._number, enrol=False)
            self.agent.run_forever(stop)

    def _on_event(self, event: Event) -> None:
        if event.name == self._event and not self.killed:
            self.killed = True
            folder = self.agent.config.folder
            shutil.copytree(folder, self._copy, ignore=shutil.ignore_patterns("*.tmp"))
            raise Killed

    @property
    def _copy(self) -> Path:
        return self.agent.config.folder.with_name(f"copy-{self._number}")


def carry_out(federation: Federation, maker: Callable[..., Path], server: str, event: str, **task: Any) -> None:
    protocol = task.pop("protocol", "neighbours")
    policy: dict[str, Any] = {"protocols": ("complete", protocol), "server": server, "dropouts": 0.1}
    federation.bundle_file = maker(federation.publisher_key, **policy)
    mortal = Mortal(federation, 0, event)
    agents: list[Any] = [mortal, *(federation.agent(number) for number in range(1, COUNT))]
    values: dict[str, Any] = {
        "cohort": COUNT, "min_cohort": COUNT, "threshold": None, "protocol": protocol, "deadlines": LONG, **task,
    }  # fmt: skip
    made = federation.task(**values)
    assert made.protocol == protocol
    federation.run(agents, lambda: federation.operator.tasks.get(made.task_id).state != "running")
    assert mortal.killed
    infos = federation.rounds(made)
    assert [info.phase for info in infos] == ["committed"], infos
    devices = [mortal.agent, *agents[1:]]
    assert sorted(infos[0].survivors) == sorted(agent.device_id for agent in devices)
    start = federation.operator.weights.read(infos[0].weights_in)["w"]
    made_w = federation.operator.weights.read(infos[0].weights_out)["w"]
    expected = federation.expected_weights(start, [(agent, number) for number, agent in enumerate(devices)], made)
    np.testing.assert_allclose(made_w, expected, rtol=1e-6)
    for agent in devices:
        assert [entry.result for entry in agent.rounds] == ["took_part"]
        left = {path.suffix for path in (agent.config.folder / "rounds").iterdir()}
        assert left <= {".json", ""}
    # It trained once: its examples are four steps.
    assert sum(float(kept.state["seen"]) for kept in federation.states(mortal.agent.config.folder)) == 4.0


@pytest.mark.parametrize(
    ("server", "event", "protocol"),
    [
        ("malicious", "masked", "neighbours"),
        pytest.param("malicious", "confirmed", "neighbours", marks=pytest.mark.slow),
        ("semi-honest", "shared", "neighbours-mlkem"),
        pytest.param("malicious", "advertised", "neighbours-mlkem", marks=pytest.mark.slow),
        pytest.param("malicious", "uploaded", "neighbours", marks=pytest.mark.slow),
        pytest.param("semi-honest", "unmasked", "neighbours", marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled(every=8)
def test_a_round_with_an_agent_that_is_killed_in_between(
    federation: Federation, bundle_maker: Callable[..., Path], server: str, event: str, protocol: str
) -> None:
    carry_out(federation, bundle_maker, server, event, protocol=protocol)
