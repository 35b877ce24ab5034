"""Killed before or after any fsync, rename or deletion, the agent goes on or leaves cleanly, and every sum is right."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

from archipel.client import Agent, Entry
from archipel.client.connection.identity import RECORD_FILE
from archipel.client.memory.kept import FILES
from archipel.protocol.messages import DeviceId
from archipel.protocol.operator.tasks import RoundInfo, TaskInfo
from archipel.protocol.sealed import decode, encode
from archipel.server.database.tables import UPDATE_PHASES, Answer
from tests.client.rounds.kills.victim import Victim
from tests.support.federation import Federation

PHASES = dict.fromkeys(("advertising", "sharing", "complaining", "masking", "confirming", "unmasking", "updating"), 1.2)
COMMON: dict[str, Any] = {"cohort": 4, "min_cohort": 3, "deadlines": {**PHASES, "assigning": 15.0}}
SCENARIOS: dict[str, dict[str, Any]] = {
    "secure": {"threshold": 3},
    "plain": {"privacy": "plain", "threshold": None},
    "evaluation": {"kind": "evaluation", "metrics": {"mse": 256.0}, "max_examples": 100},
    "neighbours": {
        "protocol": "neighbours",
        "threshold": None,
        "min_cohort": 4,
        # The others wait for the victim, which goes on.
        "deadlines": {**dict.fromkeys(PHASES, 6.0), "advertising": 1.2, "assigning": 15.0},
    },
}
# Nobody is assumed to leave: of four devices not one could be missing.
OVER_NEIGHBOURS = {"protocols": ("complete", "neighbours"), "dropouts": 0.0}
POINTS = {"secure": 210, "plain": 160, "evaluation": 190, "neighbours": 290}
"""More than each scenario has; a kill beyond the last one kills nobody."""


@pytest.fixture
def plain(federation: Federation, bundle_maker: Callable[..., Path]) -> Federation:
    federation.bundle_file = bundle_maker(federation.publisher_key, modes=("secure", "plain"), **OVER_NEIGHBOURS)
    return federation


LEFT = (".tmp", ".masked", ".state", ".next", *FILES)


def run(federation: Federation, scenario: str, kill: int, *, restart: bool = False) -> int:
    """One round with three agents and a victim. Returns the points that it passed, 0 where it died."""
    config = federation.config("victim", allow_plain=True)
    values = {field: getattr(config, field) for field in config.__struct_fields__ if field != "attributes"}
    token = encode(federation.token())
    others = [federation.agent(number, allow_plain=True) for number in (1, 2, 3)]
    task = federation.task(**{**COMMON, **SCENARIOS[scenario]})
    victims = [Victim(values, token, kill)]

    def raise_it() -> None:
        while victims[-1].alive and not over.is_set():
            time.sleep(0.01)
        if not over.is_set():
            assert victims[0].died()
            if restart:
                federation.server.stop()
                federation.server.start()
            victims.append(Victim(values, token, 0))

    def settled() -> bool:
        if federation.operator.tasks.get(task.task_id).state == "running" or not (config.folder / RECORD_FILE).exists():
            return False
        return all(entry.step == "closed" for entry in journal(config.folder))

    over = threading.Event()
    nurse = threading.Thread(target=raise_it)
    nurse.start()
    try:
        federation.run(others, settled)
        over.set()
        nurse.join()
        try:
            points = victims[-1].stop()
        except (EOFError, ConnectionError):
            # The point was one of the last, after the round.
            assert victims[-1].died()
            victims.append(Victim(values, token, 0))
            points = victims[-1].stop()
    finally:
        over.set()
        nurse.join()
        for victim in victims:
            victim.close()
    check(federation, task, others, config.folder)
    return 0 if len(victims) > 1 else points


def journal(folder: Path) -> list[Entry]:
    """The entries as they are on disk now."""
    return [decode("entry", path.read_bytes(), Entry) for path in (folder / "rounds").glob("[!.]*.json")]


def check(federation: Federation, task: TaskInfo, others: list[Agent], folder: Path) -> None:
    with Agent(federation.config("victim"), examples=dict) as agent:
        victim = agent.device_id
        numbers = {victim: 0, **{other.device_id: number for number, other in enumerate(others, start=1)}}
        entries = {entry.round_id: entry for entry in agent.rounds}
    assert federation.operator.tasks.get(task.task_id).state == "completed"
    [info] = [each for each in federation.rounds(task) if each.phase == "committed"]
    for round_id, entry in entries.items():
        query = select(Answer.digest).where(
            Answer.round_id == round_id, Answer.device_id == victim, Answer.phase.in_(UPDATE_PHASES)
        )
        with federation.server._services.database.read() as session:
            # What the server got is what was on the disk before it was sent.
            assert set(session.scalars(query)) <= {entry.masked}
    entry = entries.get(info.round_id)
    counted = entry is not None and entry.result == "took_part"
    assert not counted or victim in info.survivors
    steps = 4.0 if counted and task.kind == "training" else 0.0
    assert sum(float(kept.state["seen"]) for kept in federation.states(folder)) == steps
    left = [path.name for path in folder.rglob("*") if path.suffix in LEFT]
    assert not left, left
    CHECKS[task.kind](federation, task, info, numbers)


def check_sum(federation: Federation, task: TaskInfo, info: RoundInfo, numbers: dict[str, int]) -> None:
    start = federation.operator.weights.read(info.weights_in)["w"]
    made = federation.operator.weights.read(info.weights_out)["w"]
    survivors = [(Named(federation, device, numbers[device]), numbers[device]) for device in info.survivors]
    expected = federation.expected_weights(start, survivors, task)
    np.testing.assert_allclose(made, expected, rtol=1e-6, atol=1e-4 if task.privacy == "plain" else 0)


def check_metrics(federation: Federation, task: TaskInfo, info: RoundInfo, numbers: dict[str, int]) -> None:
    w = federation.operator.weights.read(info.weights_in)["w"]
    data = [federation.data(numbers[device]) for device in info.survivors]
    errors = np.concatenate([fields["x"] @ w - fields["y"] for fields in data])
    assert info.result.metrics["mse"] == pytest.approx(float(np.mean(errors**2)), rel=1e-2)


CHECKS: dict[str, Callable[..., None]] = {"training": check_sum, "evaluation": check_metrics}


class Named:
    """A device of which no more than its folder, where its seeds are, is asked for."""

    def __init__(self, federation: Federation, device_id: DeviceId, number: int) -> None:
        self.device_id = device_id
        self.config = federation.config(f"device-{number}" if number else "victim")


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.sampled(every=5)
def test_the_points_are_fewer_than_counted_for(plain: Federation, scenario: str) -> None:
    points = run(plain, scenario, 0)
    print(scenario, points)
    assert 0.7 * POINTS[scenario] < points < POINTS[scenario], (scenario, points)


@pytest.mark.sampled(every=628)
@pytest.mark.parametrize(("scenario", "kill"), [(name, kill) for name in SCENARIOS for kill in range(1, POINTS[name])])
def test_killed_at_any_point_it_loses_and_doubles_nothing(plain: Federation, scenario: str, kill: int) -> None:
    """After every other kill the server is restarted, too, before the agent comes back."""
    assert run(plain, scenario, kill, restart=kill % 2 == 0) in (0, *range(kill))
