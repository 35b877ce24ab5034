"""One of ten devices of a secure round keeps the sum within its bounds, and pushes as hard as these let it.

It wants the model to go its way: it fills the sum up to the norm that ten honest devices could reach if all went as far
as they may in one direction, which they never do. What stops it from the second round on: a step beyond three times
what is usual in the task is scaled down, and the operator is told. For twenty rounds, with an attacker that comes after
five of them: the model moves a little further than it would, not forty times as far.
"""

from __future__ import annotations

import numpy as np
import pytest
from sqlalchemy.orm import Session

from archipel.bundle import Bundle
from archipel.protocol.bounds import step
from archipel.server.database.tables import Round, Task
from archipel.server.rounds.aggregation import Outcome
from archipel.strategies.step_limits import Usual
from tests.attacks.bounds_federation import *  # noqa: F403
from tests.attacks.bounds_federation import CLIP, DEVICES, TASK, Digits
from tests.support.world import World

WITHIN = 0.95


def pushed(digits: Digits, mine: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Its honest direction, so much longer that the sum has WITHIN of the norm that it may have."""
    weights = (others[-1] + mine[-1]) * step(digits.layout.updates[-1])
    goal = WITHIN * CLIP * weights / step(digits.layout.updates[0])
    attack = mine.copy()
    way = mine[:-1] / np.linalg.norm(mine[:-1])
    for _ in range(20):  # to where the sum's norm is the goal
        missing = goal - np.linalg.norm(others[:-1] + attack[:-1])
        attack[:-1] += np.rint(missing * way).astype(np.int64)
    return attack


@pytest.mark.sampled(every=8)
def test_a_step_far_beyond_the_usual_is_scaled_down_and_told(world: World, bundle: Bundle) -> None:
    digits = Digits(bundle, world)
    task = world.create_task(rounds=4, **TASK)
    honest = [digits.step(digits.finish(digits.begin(task))) for _ in range(3)]
    vectors = digits.begin(task)
    vectors[0] = pushed(digits, vectors[0], sum(vectors[1:]))
    shown = digits.finish(vectors)
    assert shown["phase"] == "committed", shown["reason"]
    usual = float(np.median(honest))
    assert digits.step(shown) == pytest.approx(3 * usual, rel=1e-3)
    assert shown["step_norm"] == pytest.approx(3 * usual, rel=1e-3)
    # Without the limit it would have gone all the way.
    assert shown["step_norm"] / shown["step_scale"] == pytest.approx(WITHIN * CLIP, rel=0.05)
    assert "scaled down" in shown["reason"]
    status, metrics = world.operator("GET", f"/v1/tasks/{task['task_id']}/metrics")
    assert status == 200
    items = sorted(metrics["items"], key=lambda each: each["number"])
    assert [each["step_scale"] < 1 for each in items] == [False, False, False, True]
    log = world.operator("GET", "/v1/audit?limit=500")[1]["items"]
    told = [each for each in log if each["action"] == "round.committed" and each["detail"]["reason"]]
    assert [each["subject"] for each in told] == [shown["round_id"]]
    assert len(shown["survivors"]) == DEVICES


@pytest.mark.sampled(every=8)
def test_the_step_is_the_same_when_the_sum_is_made_again_after_a_crash(
    world: World, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator is lost after it has summed up and before it has committed: the next one comes to the same."""
    digits = Digits(bundle, world)
    task = world.create_task(rounds=2, **TASK)
    first = digits.step(digits.finish(digits.begin(task)))
    vectors = digits.begin(task)
    vectors[0] = pushed(digits, vectors[0], sum(vectors[1:]))
    made: list[str] = []

    def lost(session: Session, current: Round, task: Task, outcome: Outcome, **_: object) -> None:
        assert outcome.version is not None
        made.append(outcome.version.weights)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("archipel.server.processes.coordinator.record_result", lost)
        with pytest.raises(KeyboardInterrupt):
            digits.finish(vectors)
    world.restart_coordinator()
    world.settle()
    round_id = digits.devices[0].plan.round_id
    shown = world.operator("GET", f"/v1/rounds/{round_id}/participants")[1]
    assert (shown["phase"], shown["weights_out"]) == ("committed", made[0])
    assert digits.step(shown) == pytest.approx(3 * first, rel=1e-3)


def test_twenty_rounds_of_an_attacker_that_comes_after_five() -> None:
    """The limit by itself: honest steps of 0.022, and after five of them an attacker who asks for 1 in every round."""
    steps = [0.022] * 5
    while len(steps) < 20:
        steps.append(min(1.0, Usual(steps).limit))
    # Three times 0.022 until it has attacked half of the rounds, then half as much again.
    assert steps[5:10] == pytest.approx([0.066] * 5)
    assert max(steps) == pytest.approx(3 * 1.5 * 0.022)


def test_an_attacker_in_fewer_than_half_of_the_rounds_does_not_move_the_limit() -> None:
    steps: list[float] = [0.022]
    for number in range(2, 41):
        steps.append(min(1.0, Usual(steps).limit) if number % 3 == 0 else 0.022)
    assert max(steps) == pytest.approx(0.066)
