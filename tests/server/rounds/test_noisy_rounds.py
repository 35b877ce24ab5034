"""Rounds with the server's noise over the API: the model, the account, the budget, and what is refused."""

from __future__ import annotations

import html
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipel import strategies
from archipel.bundle import Manifest, decode_manifest
from archipel.privacy import Gaussian, Repeated, spent_epsilon
from archipel.server.database.privacy_tables import PrivacyEvent
from archipel.server.database.tables import BundleRow
from archipel.server.rounds import aggregation
from archipel.server.rounds.noise import ledger
from tests.server.rounds.noisy import CLIP, DELTA_STEP, ENTRIES, central, equal_weights, model_of, run_round
from tests.support.devices import POPULATION
from tests.support.visitors import Visitor
from tests.support.world import World

SENSITIVITY = math.ceil(CLIP * 1.001 / DELTA_STEP + math.sqrt(ENTRIES) / 2)


@pytest.fixture
def noisy(world: World, tmp_path: Path) -> World:
    return equal_weights(world, tmp_path / "equal")


def epsilon(multiplier: float, rounds: int, delta: float = 1e-5) -> float:
    return spent_epsilon([Repeated(event=Gaussian(noise_multiplier=multiplier), count=rounds)], delta)


def rows(world: World) -> list[tuple[str, str, Any]]:
    with world.services.database.read() as session:
        found = session.query(PrivacyEvent).order_by(PrivacyEvent.number)
        return [(row.population, row.model, json.loads(row.event)) for row in found]


def refused(world: World, message: str, **settings: Any) -> None:
    values = {"name": "x", "population": "pupils", "rounds": 1, "min_cohort": 3, "cohort": 3, **settings}
    status, answer = world.operator("POST", "/v1/tasks", {"bundle": world.publish(), **values})
    assert status == 422
    assert message in str(answer), answer


@pytest.mark.sampled(every=4)
def test_the_new_model_is_the_mean_with_noise_of_the_stated_size(noisy: World) -> None:
    task = noisy.create_task(differential_privacy=central(0.002), rounds=12, cohort=5)
    devices = noisy.add_devices(5)
    scale, before, noise = math.ceil(0.002 * SENSITIVITY), np.zeros(ENTRIES), []
    for number in range(12):
        exact = run_round(noisy, devices, number)
        after = model_of(noisy, task["task_id"])
        steps = (after - before) * 5 / DELTA_STEP
        np.testing.assert_allclose(steps, np.rint(steps), atol=1e-2)
        noise.append(np.rint(steps) - exact)
        before = after
    found = np.concatenate(noise)
    assert scale == 52
    assert found.std() == pytest.approx(scale, rel=5 / math.sqrt(2 * found.size))
    assert abs(found.mean()) < 5 * scale / math.sqrt(found.size)
    assert noisy.task(task["task_id"])["state"] == "completed"


@pytest.mark.sampled(every=4)
def test_plans_state_the_noise_and_what_it_costs_up_to_their_round(noisy: World) -> None:
    noisy.create_task(differential_privacy=central(3.0), rounds=1, cohort=3)
    devices = noisy.add_devices(3)
    run_round(noisy, devices)
    # The account is that of the model, whichever task released it.
    noisy.create_task(differential_privacy=central(3.0, delta=1e-7), rounds=2, cohort=3, name="second")
    for number in (2, 3):
        run_round(noisy, devices)
        stated = devices[0].plan and devices[0].plan.server_noise
        assert stated is not None
        assert (stated.mechanism, stated.multiplier, stated.delta) == ("central", 3.0, 1e-7)
        assert stated.epsilon == pytest.approx(epsilon(3.0, number, 1e-7))


def test_a_plan_without_noise_states_none(noisy: World) -> None:
    noisy.create_task(rounds=1, cohort=3)
    devices = noisy.add_devices(3)
    noisy.start_round(devices)
    assert devices[0].plan is not None
    assert devices[0].plan.server_noise is None


@pytest.mark.sampled(every=4)
def test_much_noise_moves_the_model_no_further_than_devices_accept(noisy: World) -> None:
    """A device knows the manifest alone: it takes the largest step that any cohort's sum can make for granted."""
    task = noisy.create_task(differential_privacy=central(50.0), rounds=2, cohort=3)
    devices = noisy.add_devices(3)
    manifest = open_manifest(noisy)
    allowed = strategies.get("fedavg").step_bound(manifest, None, 3).parameters
    before = np.zeros(ENTRIES)
    for number in range(2):
        run_round(noisy, devices, number)
        after = model_of(noisy, task["task_id"])
        # The noise is 50 times as long as an update, the step as long as the longest mean. The new model is stored in
        # float32, which moves each parameter by 2^-24 of itself at most; devices allow for that, too.
        rounding = 2.0**-24 * np.linalg.norm(after)
        assert 0.9 * CLIP < np.linalg.norm(after - before) <= allowed + rounding
        before = after
    assert [row["phase"] for row in noisy.rounds(task["task_id"])] == ["committed"] * 2


def open_manifest(world: World) -> Manifest:
    with world.services.database.read() as session:
        return decode_manifest(session.query(BundleRow).one().manifest)


@pytest.mark.sampled(every=4)
def test_the_account_is_of_all_tasks_of_a_model_in_a_population(noisy: World) -> None:
    devices = noisy.add_devices(3)
    first = noisy.create_task(differential_privacy=central(3.0), rounds=2, cohort=3)
    assert first["privacy_spent"]["epsilon"] == 0
    run_round(noisy, devices)
    run_round(noisy, devices)
    second = noisy.create_task(differential_privacy=central(5.0, delta=1e-6), cohort=3)
    run_round(noisy, devices)
    gaussian = [{"type": "gaussian", "noise_multiplier": multiplier} for multiplier in (3.0, 3.0, 5.0)]
    assert rows(noisy) == [("pupils", "tiny", [event]) for event in gaussian]
    expected = [Repeated(event=Gaussian(noise_multiplier=3.0), count=2), Gaussian(noise_multiplier=5.0)]
    for task, delta in ((first, 1e-5), (second, 1e-6)):
        spent = noisy.task(task["task_id"])["privacy_spent"]
        assert spent["epsilon"] == pytest.approx(spent_epsilon(expected, delta), rel=1e-12)
        assert (spent["population"], spent["model"], spent["releases"]) == ("pupils", "tiny", 3)
        assert (spent["delta"], spent["accountant"]) == (delta, "rdp")
        assert all(spent[name] for name in ("unit", "sampling", "trust", "covers"))
    # A version's own figure stays that of its moment.
    assert noisy.operator("POST", "/v1/models", {"name": "hours", "population": "pupils"})[0] == 201
    for number, rounds in ((1, expected[:1]), (2, expected)):
        body = {"task_id": first["task_id"]} if number == 1 else {"task_id": second["task_id"]}
        assert noisy.operator("POST", "/v1/models/hours/versions", body)[0] == 201
        version = noisy.operator("GET", f"/v1/models/hours/versions/{number}")[1]
        delta = 1e-5 if number == 1 else 1e-6
        assert version["privacy_spent"]["epsilon"] == pytest.approx(spent_epsilon(rounds, delta), rel=1e-12)


@pytest.mark.sampled(every=6)
def test_sums_without_noise_are_told_beside_the_account(noisy: World) -> None:
    devices = noisy.add_devices(3)
    noisy.create_task(rounds=2, cohort=3)
    run_round(noisy, devices)
    run_round(noisy, devices)
    task = noisy.create_task(differential_privacy=central(3.0), rounds=1, cohort=3)["task_id"]
    run_round(noisy, devices)
    spent = noisy.task(task)["privacy_spent"]
    assert (spent["releases"], spent["exact"]) == (1, 2)
    # A version's own figure is of its moment here, too.
    assert noisy.operator("POST", "/v1/models", {"name": "hours", "population": "pupils"})[0] == 201
    assert noisy.operator("POST", "/v1/models/hours/versions", {"task_id": task})[0] == 201
    noisy.clock.now += 60
    noisy.create_task(rounds=1, cohort=3, name="later")
    run_round(noisy, devices)
    assert noisy.task(task)["privacy_spent"]["exact"] == 3
    assert noisy.operator("GET", "/v1/models/hours/versions/1")[1]["privacy_spent"]["exact"] == 2


@pytest.mark.sampled(every=4)
def test_a_bundle_tells_what_the_version_told_that_it_was_made_from(noisy: World) -> None:
    devices = noisy.add_devices(3)
    own = noisy.publish()
    task = noisy.create_task(differential_privacy=central(3.0), rounds=1, cohort=3)["task_id"]
    run_round(noisy, devices)
    assert noisy.operator("POST", "/v1/models", {"name": "hours", "population": "pupils"})[0] == 201
    assert noisy.operator("POST", "/v1/models/hours/versions", {"task_id": task})[0] == 201
    assert noisy.operator("POST", "/v1/models/hours/versions", {"bundle": own, "parent": 1})[0] == 201
    first, second = (noisy.operator("GET", f"/v1/models/hours/versions/{number}")[1] for number in (1, 2))
    assert second["task_id"] is None
    assert first["privacy_spent"]["epsilon"] == pytest.approx(epsilon(3.0, 1), rel=1e-12)
    assert second["privacy_spent"] == first["privacy_spent"]
    # Of a version that rounds without noise made there is no such figure, whatever it began with.
    exact = noisy.create_task(rounds=1, cohort=3)["task_id"]
    run_round(noisy, devices)
    assert noisy.operator("POST", "/v1/models/hours/versions", {"task_id": exact, "parent": 2})[0] == 201
    assert noisy.operator("GET", "/v1/models/hours/versions/3")[1]["privacy_spent"] is None


@pytest.mark.sampled(every=4)
def test_a_task_ends_before_the_round_that_would_cost_too_much(noisy: World) -> None:
    budget = (epsilon(2.0, 2) + epsilon(2.0, 3)) / 2
    task = noisy.create_task(differential_privacy=central(2.0, epsilon=budget), rounds=9, cohort=3)
    devices = noisy.add_devices(3)
    run_round(noisy, devices)
    run_round(noisy, devices)
    noisy.settle()
    shown = noisy.task(task["task_id"])
    assert (shown["state"], shown["rounds_committed"]) == ("completed", 2)
    assert shown["reason"] == (
        f"the model has cost epsilon {epsilon(2.0, 2):.4g} at delta 1e-05 so far, another round would make it "
        f"{epsilon(2.0, 3):.4g}, and {budget:g} is allowed"
    )
    assert len(rows(noisy)) == 2
    entries = noisy.operator("GET", "/v1/audit?after=0")[1]["items"]
    assert [each["action"] for each in entries].count("task.budget-spent") == 1
    # Another task of the model finds the account as it is.
    refused(
        noisy, "differential_privacy: the model has cost epsilon", differential_privacy=central(2.0, epsilon=budget)
    )
    refused(noisy, "is spent already", differential_privacy={"mechanism": "central", "epsilon": 0.5, "delta": 1e-5})


@pytest.mark.sampled(every=4)
def test_two_tasks_at_once_share_the_budget(noisy: World) -> None:
    """Both may begin; the second one's round is not paid for, so nobody looks at its sum."""
    budget = (epsilon(2.0, 1) + epsilon(2.0, 2)) / 2
    settings = {"differential_privacy": central(2.0, epsilon=budget), "cohort": 3, "rounds": 3}
    tasks = [noisy.create_task(**settings), noisy.create_task(**settings)]
    devices = noisy.add_devices(6)
    run_round(noisy, devices)
    noisy.settle()
    shown = sorted((noisy.task(task["task_id"]) for task in tasks), key=lambda each: each["state"])
    assert [(each["state"], each["rounds_committed"]) for each in shown] == [("completed", 1), ("failed", 0)]
    [lost] = [row for row in noisy.rounds(shown[1]["task_id"]) if row["phase"] == "failed"]
    assert "another round would make it" in lost["reason"]
    assert len(rows(noisy)) == 1


@pytest.mark.sampled(every=4)
def test_a_target_gives_the_noise_and_counts_what_is_spent(noisy: World) -> None:
    wanted = {"mechanism": "central", "epsilon": 8.0, "delta": 1e-5}
    task = noisy.create_task(differential_privacy=wanted, rounds=4, cohort=3)
    multiplier = task["differential_privacy"]["noise_multiplier"]
    assert epsilon(multiplier, 4) <= 8.0 < epsilon(multiplier * 0.9999, 4)
    devices = noisy.add_devices(3)
    run_round(noisy, devices)
    noisy.operator("POST", f"/v1/tasks/{task['task_id']}/cancel")
    more = noisy.create_task(differential_privacy=wanted, rounds=4, cohort=3)
    assert more["differential_privacy"]["noise_multiplier"] > multiplier
    for number in range(4):
        run_round(noisy, devices, number)
    shown = noisy.task(more["task_id"])
    assert (shown["state"], shown["rounds_committed"]) == ("completed", 4)
    assert 7.99 < shown["privacy_spent"]["epsilon"] <= 8.0


@pytest.mark.sampled(every=3)
def test_a_round_that_fails_after_unmasking_is_charged(noisy: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that dies at the worst moment: the sum is known, and no version is made of it."""
    task = noisy.create_task(differential_privacy=central(3.0), rounds=2, cohort=3)
    devices = noisy.add_devices(3)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(aggregation, "_make", die)
        with pytest.raises(KeyboardInterrupt):
            run_round(noisy, devices)
    assert len(rows(noisy)) == 1
    noisy.restart_coordinator()
    noisy.clock.now += task["deadlines"]["aggregating"] + 1
    noisy.settle()
    assert [row["phase"] for row in noisy.rounds(task["task_id"])][:1] == ["failed"]
    assert noisy.task(task["task_id"])["privacy_spent"]["epsilon"] == epsilon(3.0, 1)


@pytest.mark.sampled(every=3)
def test_the_sum_of_a_round_that_has_ended_is_not_looked_at_for_nothing(noisy: World) -> None:
    noisy.create_task(differential_privacy=central(3.0), cohort=3)
    run_round(noisy, noisy.add_devices(3))
    with noisy.services.database.read() as session:
        [ended] = session.query(PrivacyEvent)
        round_id = ended.round_id
    assert ledger.charge(noisy.services, noisy.services.database.write, round_id) == "the round has ended"
    assert len(rows(noisy)) == 1


def test_a_round_without_a_sum_costs_nothing(noisy: World) -> None:
    task = noisy.create_task(differential_privacy=central(3.0), cohort=3)
    devices = noisy.add_devices(3)
    noisy.start_round(devices)
    noisy.clock.now += task["deadlines"]["advertising"] + 1
    noisy.settle()
    assert noisy.rounds(task["task_id"])[0]["phase"] == "failed"
    assert rows(noisy) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"privacy": "plain"}, "set privacy to 'secure'"),
        ({"mode": "asynchronous"}, "several times"),
        ({"secure_groups": 3, "cohort": 9}, "leave aggregation and secure_groups away"),
    ],
)
def test_what_it_does_not_go_with(noisy: World, settings: dict[str, Any], message: str) -> None:
    refused(noisy, message, differential_privacy=central(1.0), **settings)


def test_devices_that_weigh_by_their_examples_are_refused(world: World) -> None:
    refused(world, "weighting = 'uniform'", differential_privacy=central(1.0))


@pytest.mark.sampled(every=3)
def test_other_tasks_have_no_account(world: World) -> None:
    task = world.create_task()
    assert task["privacy_spent"] is None
    assert task["differential_privacy"]["mechanism"] == "none"


@pytest.mark.sampled(every=3)
def test_who_makes_a_task_whose_noise_drowns_the_updates_is_told(noisy: World) -> None:
    task = noisy.create_task(differential_privacy=central(20.0), rounds=12, cohort=5)
    [hint] = task["hints"]
    # Without the whole steps' part: z clip sqrt(p) / n.
    told = re.search(r"mean of 5 devices .* norm of ([\d,.]+), ([\d.]+) times the clip of 100,", hint)
    assert told is not None, hint
    assert float(told[1].replace(",", "")) == pytest.approx(20 * CLIP * math.sqrt(ENTRIES) / 5, rel=0.02)
    assert noisy.task(task["task_id"])["hints"] == task["hints"]
    page = Visitor(noisy, noisy.operator_token).words(f"/dashboard/tasks/{task['task_id']}")
    assert "Privacy noise drowns the updates: on the mean of 5 devices" in page
    noisy.operator("POST", f"/v1/tasks/{task['task_id']}/cancel")
    assert noisy.task(task["task_id"])["hints"] == []  # it is too late
    # The dashboard's form tells it before there is a task.
    form = {"name": "loud", "kind": "training", "population": POPULATION, "bundle": task["bundle"], "rounds": "12",
            "cohort": "5", "min_cohort": "5", "privacy": "secure", "mode": "semi-synchronous",
            "more": '{"differential_privacy": {"mechanism": "central", "noise_multiplier": 20.0}}'}  # fmt: skip
    visitor, made = Visitor(noisy, noisy.operator_token), len(noisy.operator("GET", "/v1/tasks")[1]["items"])
    answer = visitor.post("/dashboard/tasks/new", **form)
    assert answer.status_code == 200
    assert f"Privacy noise drowns the updates: on the {told[0]}" in html.unescape(answer.get_data(as_text=True))
    assert len(noisy.operator("GET", "/v1/tasks")[1]["items"]) == made
    assert noisy.create_task(differential_privacy=central(0.002), rounds=12, cohort=5)["hints"] == []
    assert noisy.create_task(rounds=12, cohort=5)["hints"] == []
