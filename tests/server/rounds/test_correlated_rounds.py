"""Rounds with correlated noise over the API: the noise, who rests, the account, and what is kept and forgotten."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

from archipel.errors import LeaseLostError
from archipel.privacy import Gaussian, spent_epsilon
from archipel.protocol import messages
from archipel.server.database.privacy_tables import PrivacyEvent
from archipel.server.database.tables import Answer
from archipel.server.http.api.check_ins import AT_ONCE
from archipel.server.processes import coordinator
from archipel.server.processes.lease import Lease
from archipel.server.rounds import aggregation, candidates
from archipel.server.rounds.noise import kept_noise
from archipel.server.services import Services
from tests.server.rounds.noisy import CLIP, DELTA_STEP, ENTRIES, equal_weights, give_equal, model_of, run_round
from tests.support.devices import ANSWERED, Device
from tests.support.world import World

SENSITIVITY = math.ceil(CLIP * 1.001 / DELTA_STEP + math.sqrt(ENTRIES) / 2)
COEFFICIENTS = [8, 6, 5]


@pytest.fixture
def noisy(world: World, tmp_path: Path) -> World:
    return equal_weights(world, tmp_path / "equal")


def correlated(multiplier: float | None = 0.002, **more: Any) -> dict[str, Any]:
    given = {"noise_multiplier": multiplier, "delta": 1e-5, "separation": 2, "coefficients": COEFFICIENTS, **more}
    return {"mechanism": "correlated", **given}


def in_turns(world: World, groups: int) -> Iterator[list[Device]]:
    """Groups of three devices, again and again."""
    devices = world.add_devices(3 * groups)
    return (devices[3 * (number % groups) : 3 * (number % groups) + 3] for number in count())


def steps_of(world: World, task_id: str) -> np.ndarray:
    return model_of(world, task_id) * 3 / DELTA_STEP


def rows(world: World) -> list[PrivacyEvent]:
    with world.services.database.read() as session:
        return list(session.query(PrivacyEvent).order_by(PrivacyEvent.number))


@pytest.mark.sampled(every=8)
def test_rounds_take_back_noise_of_earlier_ones(noisy: World) -> None:
    task = noisy.create_task(differential_privacy=correlated(), rounds=12, cohort=3)["task_id"]
    groups, before, noise = in_turns(noisy, 2), np.zeros(ENTRIES), []
    for number in range(12):
        exact = run_round(noisy, next(groups), number)
        after = steps_of(noisy, task)
        noise.append(np.rint(after - before) - exact)
        np.testing.assert_allclose(after - before, np.rint(after - before), atol=1e-2)
        before = after
    found = np.array(noise)
    assert noisy.task(task)["state"] == "completed"
    # m_0 e_t + m_1 e_t-1 + m_2 e_t-2 is independent noise of the stated size, in eighths of a step.
    fresh = 8 * found
    fresh[1:] += 6 * found[:-1]
    fresh[2:] += 5 * found[:-2]
    scale = math.ceil(0.002 * 8 * SENSITIVITY)
    assert fresh.std() == pytest.approx(scale, rel=5 / math.sqrt(2 * fresh.size))
    # The model has less of it than of independent noise, whose sum would be 8 sqrt(12) draws.
    gain = np.linalg.norm(np.linalg.inv(sum(c * np.eye(12, k=-lag) for lag, c in enumerate(COEFFICIENTS))).sum(axis=0))
    assert gain * 8 < 0.6 * math.sqrt(12)
    assert found.sum(axis=0).std() == pytest.approx(gain * scale, rel=5 / math.sqrt(2 * ENTRIES))
    # Nothing of the noise is left, by which the sums could be told.
    assert noisy.stored("updates") == {}


@pytest.mark.sampled(every=4)
def test_the_account_is_that_of_devices_that_come_as_often_as_they_may(noisy: World) -> None:
    settings = correlated(3.0, separation=3, coefficients=[8, 4])
    task = noisy.create_task(differential_privacy=settings, rounds=5, cohort=3)["task_id"]
    groups, squares = in_turns(noisy, 3), [1, 1 / 4, 0, 1, 1 / 4]
    for number in range(5):
        run_round(noisy, next(groups), number)
        spent = noisy.task(task)["privacy_spent"]
        multiplier = 3.0 / math.sqrt(sum(squares[: number + 1]))
        assert spent["epsilon"] == pytest.approx(spent_epsilon([Gaussian(noise_multiplier=multiplier)], 1e-5), rel=1e-9)
        assert spent["releases"] == number + 1


@pytest.mark.sampled(every=4)
def test_a_device_rests_until_others_had_their_rounds(noisy: World) -> None:
    task = noisy.create_task(differential_privacy=correlated(separation=3), rounds=3, cohort=3)["task_id"]
    groups = in_turns(noisy, 3)
    first, second, third = next(groups), next(groups), next(groups)
    run_round(noisy, first, 1)
    for device in first:
        device.check_in()
    noisy.settle()
    assert [row["phase"] for row in noisy.rounds(task)] == ["committed"]
    # It is not kept waiting either: it is to come again in a while.
    held = first[0].ask("POST", "/v1/check-ins", messages.CheckInResponse, messages.CheckIn(wait=15.0))
    assert held.retry_after > AT_ONCE
    shown = noisy.task(task)["waiting_for"]
    assert "3 devices rest: they were in a sum less than 3 sums ago" in shown
    run_round(noisy, second, 2)
    for device in (*first, *second):
        device.check_in()
    noisy.settle()
    assert len(noisy.rounds(task)) == 2
    run_round(noisy, third, 3)
    assert noisy.task(task)["state"] == "completed"


@pytest.mark.sampled(every=3)
def test_a_sum_with_a_device_that_came_too_early_is_not_looked_at(
    noisy: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever has let the device in: the round fails before its sum is unmasked, and costs nothing."""
    task = noisy.create_task(differential_privacy=correlated(), rounds=2, cohort=3)["task_id"]
    first = next(in_turns(noisy, 2))
    run_round(noisy, first, 1)
    monkeypatch.setattr(candidates, "in_last_sums", lambda task: select(Answer.device_id).where(Answer.device_id == ""))
    monkeypatch.setattr(coordinator, "aggregate", None)  # nobody calls it
    run_round(noisy, first, 2)
    failed = [row for row in noisy.rounds(task) if row["phase"] == "failed"]
    assert [row["reason"] for row in failed] == ["noise: 3 of the round's devices were in a sum less than 2 sums ago"]
    assert len(rows(noisy)) == 1


@pytest.mark.sampled(every=4)
def test_a_round_that_is_aggregated_again_adds_the_same_noise_and_is_paid_for_once(
    noisy: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = noisy.create_task(differential_privacy=correlated(3.0), rounds=2, cohort=3)["task_id"]
    groups, released = in_turns(noisy, 2), []
    make = aggregation._make

    def die(services: Any, collected: Any, decoded: Any, kept: Any) -> Any:
        released.append(np.concatenate([decoded.deltas[name].reshape(-1) for name in ("w", "b")]))
        if len(released) == 1:
            raise KeyboardInterrupt
        return make(services, collected, decoded, kept)

    monkeypatch.setattr(aggregation, "_make", die)
    with pytest.raises(KeyboardInterrupt):
        run_round(noisy, next(groups), 1)
    noisy.restart_coordinator()
    noisy.settle()
    assert [row["phase"] for row in noisy.rounds(task)] == ["committed"]
    np.testing.assert_array_equal(released[0], released[1])
    assert len(rows(noisy)) == 1
    run_round(noisy, next(groups), 2)
    assert noisy.task(task)["state"] == "completed"
    assert len(rows(noisy)) == 2


@pytest.mark.sampled(every=4)
def test_of_two_coordinators_that_draw_noise_for_one_sum_one_adds_it(
    noisy: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first was stopped for longer than its lease between its draw and the account; the other one went on."""
    opened = [Services.open(noisy.settings, clock=noisy.clock) for _ in range(2)]
    leases = [Lease(each.database, holder * 32, clock=noisy.clock, seconds=10.0) for each, holder in zip(opened, "ab")]
    first, second = (coordinator.Coordinator(*each) for each in zip(opened, leases))
    assert leases[0].take()
    noisy.coordinator = first
    task = noisy.create_task(differential_privacy=correlated(), rounds=3, cohort=3)["task_id"]
    groups, draw, drawn = in_turns(noisy, 2), kept_noise.draw, []
    run_round(noisy, next(groups), 1)
    before, devices = steps_of(noisy, task), next(groups)
    noisy.start_round(devices)
    exact = give_equal(devices, 2)
    noisy.run_to("unmasking", devices)
    for device in devices:
        device.unmasking()

    def stopped(services: Services, round_id: str) -> str:
        drawn.append(draw(services, round_id))
        mine = drawn[-1]
        if services is opened[0]:
            noisy.clock.now += 11
            assert leases[1].take()
            while second.step():
                pass
        return mine

    monkeypatch.setattr(kept_noise, "draw", stopped)
    assert first.step()  # to phase aggregating
    with pytest.raises(LeaseLostError):
        first.step()
    assert [row["phase"] for row in noisy.rounds(task)] == ["committed"] * 2
    paid = rows(noisy)[1:]
    assert len(drawn) == 2
    assert [row.noise for row in paid] == drawn[1:]
    noise = kept_noise.noise_of(noisy.services, paid[0].round_id)
    np.testing.assert_allclose(steps_of(noisy, task) - before, exact + noise, atol=1e-2)
    for each in opened:
        each.database.dispose()


@pytest.mark.sampled(every=4)
def test_the_noise_is_kept_as_long_as_it_is_needed_and_sealed(noisy: World) -> None:
    task = noisy.create_task(differential_privacy=correlated(), rounds=9, cohort=3)["task_id"]
    groups = in_turns(noisy, 2)
    for number in range(4):
        run_round(noisy, next(groups), number)
        kept = {name for name in noisy.stored("updates") if task in name}
        assert {name.rpartition(".")[2] for name in kept} == {row.noise for row in rows(noisy)[-2:]}
    last = rows(noisy)[-1].round_id
    noise = kept_noise.noise_of(noisy.services, last)
    assert len(noisy.stored("updates")) == 2
    for data in noisy.stored("updates").values():
        assert noise.tobytes() not in data
        assert len(data) == noise.nbytes + 28
    assert noisy.operator("POST", f"/v1/tasks/{task}/cancel")[0] == 200
    noisy.clock.now += 3600
    noisy.settle()
    assert noisy.stored("updates") == {}


@pytest.mark.sampled(every=8)
def test_a_kill_leaves_no_noise_that_is_not_needed(noisy: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after a round was paid for, and before the oldest noise was deleted."""
    noisy.create_task(differential_privacy=correlated(), rounds=9, cohort=3)
    groups, forget = in_turns(noisy, 2), kept_noise.forget
    run_round(noisy, next(groups), 0)
    run_round(noisy, next(groups), 1)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    for number in (2, 3):
        monkeypatch.setattr(kept_noise, "forget", die)
        with pytest.raises(KeyboardInterrupt):
            run_round(noisy, next(groups), number)
        monkeypatch.setattr(kept_noise, "forget", forget)
        noisy.restart_coordinator()
        noisy.settle()
    assert len(noisy.stored("updates")) == 4
    run_round(noisy, next(groups), 4)
    assert {name.rpartition(".")[2] for name in noisy.stored("updates")} == {row.noise for row in rows(noisy)[-2:]}


@pytest.mark.sampled(every=4)
def test_earlier_noise_is_in_memory_one_round_at_a_time(noisy: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it would be 62 times as large as the model with 32 coefficients."""
    noisy.create_task(differential_privacy=correlated(coefficients=[8, 7, 6, 5, 4, 3]), rounds=6, cohort=3)
    groups, read, alive = in_turns(noisy, 2), kept_noise._read, []
    arrays: list[weakref.ref[np.ndarray]] = []

    def watched(*what: Any) -> np.ndarray:
        found = read(*what)
        arrays.append(weakref.ref(found))
        alive.append(sum(each() is not None for each in arrays))
        return found

    monkeypatch.setattr(kept_noise, "_read", watched)
    for number in range(6):
        run_round(noisy, next(groups), number)
    # Each round reads that of up to five others, and its own when it is aggregated.
    assert len(alive) == 0 + 1 + 2 + 3 + 4 + 5 + 6
    assert max(alive) <= 2


@pytest.mark.sampled(every=4)
def test_a_task_whose_noise_is_lost_ends_before_devices_work_for_it(noisy: World) -> None:
    task = noisy.create_task(differential_privacy=correlated(), rounds=9, cohort=3)["task_id"]
    groups = in_turns(noisy, 2)
    run_round(noisy, next(groups), 1)
    noisy.services.spool.discard(task)
    for device in next(groups):
        device.check_in()
    noisy.settle()
    shown = noisy.task(task)
    assert (shown["state"], len(noisy.rounds(task))) == ("failed", 1)
    assert "noise of the task's earlier rounds is lost" in shown["reason"]


@pytest.mark.sampled(every=4)
def test_noise_that_is_lost_in_a_round_fails_it_unpaid(noisy: World) -> None:
    task = noisy.create_task(differential_privacy=correlated(), rounds=9, cohort=3)["task_id"]
    groups = in_turns(noisy, 2)
    run_round(noisy, next(groups), 1)
    devices = next(groups)
    noisy.start_round(devices)
    noisy.services.spool.discard(task)
    give_equal(devices, 2)
    for phase in ANSWERED:
        for device in devices:
            device.answer(phase)
        noisy.settle()
    [failed] = [row for row in noisy.rounds(task) if row["phase"] == "failed"]
    assert failed["reason"].startswith("noise: ")
    assert "cannot be read" in failed["reason"]
    assert len(rows(noisy)) == 1


@pytest.mark.sampled(every=4)
def test_a_target_gives_coefficients_and_noise(noisy: World) -> None:
    wanted = {"mechanism": "correlated", "epsilon": 8.0, "delta": 1e-5, "separation": 2}
    task = noisy.create_task(differential_privacy=wanted, rounds=3, cohort=3)
    given = task["differential_privacy"]
    assert given["coefficients"][0] == 64
    assert len(given["coefficients"]) == 2
    groups = in_turns(noisy, 2)
    for number in range(3):
        run_round(noisy, next(groups), number)
    shown = noisy.task(task["task_id"])
    assert (shown["state"], shown["rounds_committed"]) == ("completed", 3)
    assert 7.99 < shown["privacy_spent"]["epsilon"] <= 8.0
