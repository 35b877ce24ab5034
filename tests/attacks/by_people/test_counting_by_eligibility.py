"""Somebody with an access token asks how many devices of a population fit an expression, with one expression after the
other, until only one device is left, and so learns what that device says of itself, which is shown to nobody: from the
number of waiting devices, from the words about what a task waits for, from whether it starts, and from who is in it.

What stops them: numbers that depend on an expression are told in steps of the server's `smallest_answer` and below it
not at all; a task with an expression needs as many devices; and the devices in its rounds go by other names.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fixtures.server import (  # noqa: F401  (fixtures)
    bundle_file,
    data_folder,
    empty_database,
    keys,
    world,
)
from tests.support.fleet import GATE, MODEL, STAGES, Fleet
from tests.support.world import World

TEN = 10


TASK = {"name": "count", "population": "pupils", "rounds": 1, "cohort": 20, "threshold": 12}


@pytest.fixture
def server_settings() -> dict[str, object]:
    return {"smallest_answer": TEN}


@pytest.fixture
def village(world: World) -> World:  # noqa: F811
    """Thirteen devices that wait; one of them says that it is ill."""
    for number, device in enumerate(world.add_devices(13)):
        device.attributes = {"house": float(number), "ill": number == 7}
        device.check_in()
    return world


def ask(world: World, eligibility: str, **changes: Any) -> tuple[int, Any]:  # noqa: F811
    values = {**TASK, "min_cohort": TEN, "bundle": world.publish(), "eligibility": eligibility, **changes}
    return world.operator("POST", "/v1/tasks", values)


@pytest.mark.sampled(every=4)
def test_counts_and_words_tell_no_single_device(village: World) -> None:
    houses = "house in [" + ", ".join(map(str, range(13)))
    seen = []
    for expression in ("ill and house == 7", "ill and house == 6", "ill", "house == 99", f"{houses}] and not ill"):
        status, task = ask(village, expression)
        assert status == 201, task
        seen.append((task["waiting"], task["waiting_for"]))
    # Whether it is true of one device, of another, or of none looks the same; and so does 12 beside 13.
    few = "fewer than 10 of the devices that wait may take part; 12 needed"
    assert seen == [(None, few)] * 4 + [(10, "")]
    everybody = ask(village, f"{houses}]")[1]
    assert everybody["waiting"] == 10
    # What many report is not said to be missing, what few report is not said to be there.
    village.devices[0].attributes = {**village.devices[0].attributes, "rare": True}
    village.devices[0].check_in()
    for name in ("rare", "absent"):
        said = ask(village, f"{name} == true")[1]["waiting_for"]
        assert said.startswith(f"fewer than 10 devices of the population report '{name}'")


@pytest.mark.sampled(every=4)
def test_a_task_that_would_start_with_few_is_refused(village: World) -> None:
    status, answer = ask(village, "ill", min_cohort=3, cohort=5, threshold=3)
    assert status == 422
    assert "min_cohort: 3 is below 10" in answer["detail"]
    assert ask(village, "", min_cohort=3, cohort=5, threshold=3)[0] == 201


@pytest.mark.sampled(every=4)
def test_a_rollout_whose_gate_hears_few_is_refused(village: World) -> None:
    """Whether its gate hears enough devices tells how many fit the expression; and so what it heard from them."""
    fleet = Fleet(village).create()
    wanted = {"model": MODEL, "version": 2, "stages": STAGES, "eligibility": "ill", "gate": {**GATE, "max_devices": 20}}
    status, answer = village.operator("POST", "/v1/rollouts", wanted)
    assert status == 422
    assert "gate: min_devices: 3 is below 10" in answer["detail"]
    fleet.post("rollouts", {**wanted, "eligibility": ""}, 201)


@pytest.mark.sampled(every=4)
def test_auditors_are_told_no_number(village: World) -> None:
    _, task = ask(village, "not ill")
    made = village.operator("POST", "/v1/tokens", {"name": "a", "role": "auditor"})[1]
    _, shown = village.operator(
        "GET", f"/v1/tasks/{task['task_id']}", headers={"Authorization": f"Bearer {made['token']}"}
    )
    assert (shown["waiting"], shown["waiting_for"]) == (None, "")


@pytest.mark.sampled(every=4)
def test_who_is_in_such_a_round_goes_by_another_name(village: World) -> None:
    _, task = ask(village, "not ill", cohort=12, threshold=8)
    village.settle()
    village.clock.now += 1
    [found] = village.rounds(task["task_id"])
    names = {each["device_id"] for each in found["participants"]}
    assert len(names) == 12
    assert not names & {device.id for device in village.devices}
    for device in village.devices:
        assert village.operator("GET", f"/v1/devices/{device.id}")[1]["rounds"] == 0


@pytest.mark.sampled(every=4)
def test_who_runs_what_is_no_way_round(village: World) -> None:
    """A rollout to the devices for which the expression is true, and then the number of those that run the version."""
    digest = village.publish()
    for path, body in (
        ("models", {"name": "m", "population": "pupils"}), ("models/m/versions", {"bundle": digest}),
        ("models/m/promote", {"version": 1}),
    ):  # fmt: skip
        assert village.operator("POST", f"/v1/{path}", body)[0] in (200, 201), path
    assert village.operator("GET", "/v1/models/m/versions/1")[1]["downloaded"] == 0
    with village.services.database.write() as session:
        from archipel.server.database.registry_tables import Rollout

        session.add(
            Rollout(
                rollout_id="0" * 32, model="m", population="pupils", version=1, baseline=1, state="completed",
                state_ends=0.0, stage=1, percent=100.0, eligibility="ill", salt="00", request=b"{}", reason="",
                created=0.0, ended=1.0,
            )
        )  # fmt: skip
    assert village.operator("GET", "/v1/models/m/versions/1")[1]["downloaded"] is None
    for device in village.devices:
        device.versions = {"m": 1}
        device.check_in()
    assert village.operator("GET", "/v1/models/m/versions/1")[1]["downloaded"] == 10
