"""How a task's rounds go, in one answer: numbers of devices by phase, seconds, bytes, who is missing and why."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest

from archipel.protocol.messages import Bins
from archipel.protocol.uploads import metric_arrays
from archipel.server.database.fault_tables import Fault
from archipel.server.database.tables import Round
from archipel.server.devices.smallest_answer import pseudonym
from tests.server.rounds.test_evaluating import PLAIN, evaluate, train
from tests.server.rounds.test_evaluation_and_analytics import RANGES, take_part
from tests.server.rounds.test_leaving import leave
from tests.server.rounds.test_plain_rounds import update
from tests.server.rounds.test_secure_round import give_updates
from tests.support.devices import POPULATION, Device
from tests.support.world import World


def progress(world: World, task: dict[str, Any], **query: int) -> dict[str, Any]:
    asked = "".join(f"?{name}={value}" for name, value in query.items())
    status, answer = world.operator("GET", f"/v1/tasks/{task['task_id']}/progress{asked}")
    assert status == 200, answer
    made: dict[str, Any] = answer
    return made


def funnel(of_round: dict[str, Any]) -> list[tuple[str, int | None, int | None]]:
    return [(step["phase"], step["answered"], step["expected"]) for step in of_round["phases"]]


def reasons(of_round: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {each["device_id"]: (each["furthest"], each["reason"]) for each in of_round["missing_devices"]}


def counted(devices: list[Device]) -> tuple[Counter[str], Counter[str]]:
    """What each device sends from now on, and gets before it sends, in bytes of bodies, as its own side sees them."""
    up: Counter[str] = Counter()
    down: Counter[str] = Counter()
    last: Counter[str] = Counter()
    for device in devices:

        def send(
            method: str, path: str, body: bytes | None, headers: dict[str, str], *, of: Device = device,
            below: Any = device.transport,
        ) -> tuple[int, bytes]:  # fmt: skip
            status, answer = below(method, path, body, headers)
            if method == "PUT":
                up[of.id] += len(body or b"")
                last[of.id] = down[of.id]
            down[of.id] += len(answer)
            return int(status), bytes(answer)

        device.transport = send
    return up, last


@pytest.mark.sampled(every=3)
def test_the_funnel_of_a_secure_round_and_who_fell_out_where(world: World) -> None:
    task = world.create_task(cohort=5, min_cohort=3)
    assert progress(world, task)["waiting_for"] == f"no device is enrolled in population {POPULATION!r}"
    devices = world.add_devices(5)
    for device in devices:
        device.check_in()
    world.settle()
    began = world.clock.now
    up, down = counted(devices)
    assert all(device.join() for device in devices)
    give_updates(devices, [1, 2, 1, 3, 1])
    alive = list(devices)
    silent = {"sharing": devices[4], "confirming": devices[3]}
    for phase in ("advertising", "sharing", "complaining", "masking", "confirming", "unmasking"):
        if phase in silent:
            alive.remove(silent[phase])
        world.clock.now += 2
        for device in alive:
            device.answer(phase)
        [now] = progress(world, task)["running"]
        if phase == "masking":
            assert (now["phase"], now["needed"], now["in_sum"], now["missing"]) == ("masking", 3, None, 1)
            assert funnel(now)[-1] == ("masking", 4, 4)
            assert now["seconds"] == world.clock.now - began
            assert reasons(now) == {devices[4].id: ("advertising", "it sent nothing in phase sharing")}
        if phase == "sharing":
            # Everybody may still come until the deadline.
            assert reasons(now) == {devices[4].id: ("advertising", "it has not answered yet")}
            assert funnel(now)[-1] == ("sharing", 4, 5)
        if phase in silent:
            world.clock.now += task["deadlines"][phase]
        world.settle()
    whole = progress(world, task)
    assert (whole["state"], whole["running"], whole["now"]) == ("completed", [], world.clock.now)
    [ended] = whole["newest"]
    assert funnel(ended) == [
        ("assigning", 5, 5), ("advertising", 5, 5), ("sharing", 4, 5), ("complaining", 4, 4), ("masking", 4, 4),
        ("confirming", 3, 4), ("unmasking", 3, 3), ("aggregating", None, None),
    ]  # fmt: skip
    seconds = {step["phase"]: step["seconds"] for step in ended["phases"]}
    assert (seconds["advertising"], seconds["sharing"]) == (2, 2 + task["deadlines"]["sharing"])
    assert sum(seconds.values()) == ended["seconds"] == world.clock.now - began
    assert (ended["outcome"], ended["assigned"], ended["in_sum"], ended["missing"]) == ("committed", 5, 4, 2)
    assert reasons(ended) == {
        devices[4].id: ("advertising", "it sent nothing in phase sharing"),
        devices[3].id: ("masking", "it sent nothing in phase confirming"),
    }
    where = {each["device_id"]: each for each in ended["missing_devices"]}
    assert [where[silent[phase].id]["in_sum"] for phase in ("sharing", "confirming")] == [False, True]
    assert where[devices[4].id]["answered"] == began + 2
    assert where[devices[4].id]["bytes_up"] == up[devices[4].id]
    assert ended["bytes_up"] == sum(up.values())
    assert ended["bytes_down"] == sum(down.values())
    model = whole["model"]
    assert (model["number"], model["weights"], model["registered"]) == (1, ended["weights_out"], [])
    status, weights = world.operator("GET", model["path"])
    assert (status, len(weights)) == (200, model["bytes"])


@pytest.mark.sampled(every=3)
def test_devices_that_leave_and_a_round_that_fails(world: World) -> None:
    task = world.create_task(privacy="plain", threshold=None, cohort=4, min_cohort=3)
    devices = world.add_devices(4)
    world.start_round(devices)
    devices[2].updating(**update(1))
    assert leave(devices[0], "data")[0] == 200
    [now] = progress(world, task)["running"]
    assert funnel(now) == [("assigning", 4, 4), ("updating", 1, 3)]
    assert (now["left"], now["refused"], now["missing"]) == (1, {"data": 1}, 3)
    assert reasons(now)[devices[0].id] == ("assigning", "it left the round")
    assert leave(devices[1])[0] == 200
    world.settle()
    whole = progress(world, task)
    [failed] = whole["newest"]
    assert (failed["outcome"], failed["in_sum"], failed["weights_out"]) == ("failed", None, None)
    assert failed["reason"] == "2 of 4 devices left the round in phase updating, 3 needed"
    # It had time left, and others ended the round: it is not to blame.
    assert reasons(failed)[devices[3].id] == ("assigning", "the round ended before it answered")
    assert whole["last_failure"].endswith("(they said: data 1, untold 1)")
    assert whole["model"]["number"] == 0
    assert progress(world, task, rounds=0)["newest"] == []


@pytest.mark.sampled(every=3)
def test_a_device_that_let_the_time_of_a_failed_round_go_by(world: World) -> None:
    task = world.create_task(privacy="plain", threshold=None, cohort=4, min_cohort=3)
    devices = world.add_devices(4)
    world.start_round(devices)
    devices[2].updating(**update(1))
    world.clock.now += 600
    world.settle()
    [failed] = progress(world, task)["newest"]
    assert reasons(failed)[devices[3].id] == ("assigning", "it sent nothing in phase updating")


@pytest.mark.sampled(every=3)
def test_the_sums_metrics_and_how_they_are_spread_over_the_devices(world: World) -> None:
    task = world.create_task(
        kind="evaluation", metrics=RANGES, privacy="plain", cohort=10, min_cohort=10, threshold=None,
        distributions={"accuracy": "default"},
    )  # fmt: skip
    asked = {name: msgspec.convert(each, Bins) for name, each in task["distributions"].items()}
    hits = np.linspace(0.1, 1.0, 10)
    take_part(
        world,
        world.add_devices(10),
        [metric_arrays({"loss": 0.5, "accuracy": hit}, RANGES, 20, 200, asked) for hit in hits],
    )
    [ended] = progress(world, task)["newest"]
    assert ended["metrics"]["evaluation accuracy"] == pytest.approx(hits.mean(), abs=1e-3)
    spread = ended["distributions"]["evaluation accuracy"]
    assert spread["counts"][1:-1] == np.histogram(hits, spread["edges"])[0].tolist()


@pytest.mark.sampled(every=4)
def test_an_evaluation_is_told_with_the_round_that_made_the_version(world: World) -> None:
    task = world.create_task(rounds=2, evaluate_every=1, **PLAIN)
    devices = world.add_devices(3)
    train(world, devices)
    assert progress(world, task)["waiting_for"] == "waits for the evaluation of version 1"
    evaluate(world, devices, 0.5)
    [first] = progress(world, task)["newest"]
    assert first["evaluation_state"] == "completed"
    assert first["metrics"] == pytest.approx({"evaluation loss": 0.5, "evaluation accuracy": 0.75})
    evaluation = world.operator("GET", f"/v1/tasks/{task['task_id']}/metrics")[1]["items"][0]["evaluation"]
    of_evaluation = progress(world, {"task_id": evaluation})
    assert (of_evaluation["kind"], of_evaluation["model"]) == ("evaluation", None)
    assert of_evaluation["newest"][0]["metrics"] == first["metrics"]


@pytest.mark.sampled(every=6)
def test_the_model_says_which_versions_have_it(world: World) -> None:
    task = world.create_task(**{**PLAIN, "metrics": {}, "max_examples": 1000})
    train(world, world.add_devices(3))
    assert world.operator("POST", "/v1/models", {"name": "digits", "population": POPULATION})[0] == 201
    status, answer = world.operator("POST", "/v1/models/digits/versions", {"task_id": task["task_id"]})
    assert (status, answer["number"]) == (201, 1)
    assert world.operator("POST", "/v1/models/digits/promote", {"version": 1})[0] in (200, 201)
    named = progress(world, task)["model"]["registered"]
    assert named == [{"model": "digits", "version": 1, "promoted": True}]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("server_settings", [{"smallest_answer": 3}])
def test_of_devices_that_an_expression_chose_nothing_tells_which_they_are(world: World) -> None:
    task = world.create_task(cohort=4, min_cohort=3, eligibility="ram >= 1")
    devices = world.add_devices(4)
    for device in devices:
        device.attributes = {"ram": 2.0}
        device.check_in()
    [waiting] = progress(world, task)["running"] or [{"phases": [{"phase": "assigning", "answered": None}]}]
    world.settle()
    assert all(device.join() for device in devices)
    for device in devices[:3]:
        device.advertising()
    round_id = devices[0].round.rpartition("/")[2]
    with world.services.database.write() as session:
        reason = f"its signed envelope for {devices[1].id} holds no shares"
        session.add(Fault(round_id=round_id, device_id=devices[2].id, reason=reason, noted=world.clock.now))
    whole = progress(world, task)
    [now] = whole["running"]
    key = world.settings.pseudonym_key
    names = {device.id: pseudonym(key, now["round_id"], device.id) for device in devices}
    assert reasons(now) == {names[devices[3].id]: ("assigning", "it has not answered yet")}
    assert [each["answered"] for each in now["missing_devices"]] == [None]
    other = names[devices[1].id]
    assert now["faults"] == [
        {"device_id": names[devices[2].id], "reason": f"its signed envelope for {other} holds no shares"}
    ]
    old = world.operator("GET", f"/v1/rounds/{round_id}/participants")[1]
    assert old["faults"] == now["faults"]
    for answer in (whole, old):
        assert not {device.id for device in devices} & set(re.findall("[0-9a-f]{32}", str(answer)))
    # How many wait for a round is told of no task with an expression.
    assert waiting["phases"][0]["answered"] is None


@pytest.mark.sampled(every=3)
def test_a_buffer_counts_the_updates_that_are_in_it(world: World) -> None:
    task = world.create_task(
        privacy="plain", threshold=None, mode="asynchronous", cohort=3, min_cohort=3, concurrency=6, rounds=2
    )
    devices = world.add_devices(6)
    world.start_round(devices)
    for device in devices[:2]:
        device.updating(**update(1))
        world.settle()
    [now] = progress(world, task)["running"]
    assert funnel(now) == [("buffering", 2, 3)]
    assert now["missing"] == 4
    devices[2].updating(**update(1))
    world.settle()
    [first] = progress(world, task)["newest"]
    assert (first["in_sum"], first["outcome"]) == (3, "committed")


@pytest.mark.sampled(every=3)
def test_rounds_from_before_phases_were_noted_have_no_seconds(world: World) -> None:
    task = world.create_task(**{**PLAIN, "metrics": {}, "max_examples": 1000})
    train(world, world.add_devices(3))
    with world.services.database.write() as session:
        session.query(Round).one().phases = None
    [ended] = progress(world, task)["newest"]
    assert [(step["phase"], step["answered"], step["seconds"]) for step in ended["phases"]] == [
        ("assigning", 3, None), ("updating", 3, None)
    ]  # fmt: skip
