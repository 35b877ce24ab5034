"""The first digits of an id stand for it, against a server over TCP."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from sqlalchemy import update

from archipel.server.database.tables import Task
from tests.cli.federation.test_round import reached  # noqa: F401  (a fixture)
from tests.support.fixtures.server import *  # noqa: F403
from tests.support.world import World

Command = Callable[..., tuple[str, str]]
TASKS = ("4f2a" + 28 * "0", "4f2b" + 28 * "0", "4f2b" + 27 * "0" + "1")


@pytest.fixture
def world_of_ids(reached: World) -> World:  # noqa: F811
    """Three tasks with chosen ids, one that holds a round, and three devices."""
    reached.create_task(name="held", privacy="plain", threshold=None, cohort=3)
    reached.start_round(reached.add_devices(3))
    for number, task_id in enumerate(TASKS):
        made = reached.create_task(name=f"t{number}")["task_id"]
        with reached.services.database.write() as session:
            session.execute(update(Task).where(Task.task_id == made).values(task_id=task_id))
    return reached


@pytest.mark.sampled(every=4)
def test_a_beginning_stands_for_the_id(archipel: Command, world_of_ids: World) -> None:
    assert json.loads(archipel("task", "show", "4f2a", "--json")[0])["task_id"] == TASKS[0]
    first, second, _ = world_of_ids.devices
    round_id = first.round.rsplit("/", 1)[1]
    assert json.loads(archipel("round", "show", round_id[:12], "--json")[0])["round_id"] == round_id
    assert json.loads(archipel("population", "show-device", first.id[:12], "--json")[0])["device_id"] == first.id
    shown = archipel("population", "revoke-device", first.id[:12], second.id)[0]
    assert [line.split()[0] for line in shown.splitlines()] == [first.id, second.id]
    assert archipel("task", "cancel", "4f2a")[0] == "cancelled\n"


@pytest.mark.sampled(every=3)
def test_an_ambiguous_one_names_the_candidates(archipel: Command, world_of_ids: World) -> None:
    said = archipel("task", "cancel", "4f2b", code=1)[1]
    assert "4f2b: the ids of several tasks begin so; type more of one" in said
    assert f"{TASKS[1]} ('t1', running)" in said
    assert f"{TASKS[2]} ('t2', running)" in said
    assert world_of_ids.task(TASKS[1])["state"] == world_of_ids.task(TASKS[2])["state"] == "running"
    assert json.loads(archipel("task", "show", TASKS[2], "--json")[0])["name"] == "t2"


@pytest.mark.sampled(every=3)
def test_one_that_nothing_has_and_what_is_none(archipel: Command, world_of_ids: World) -> None:
    assert "beef: the id of no task begins so; `archipel task list`" in archipel("task", "show", "beef", code=1)[1]
    assert "beef: the id of no round begins so" in archipel("round", "show", "beef", code=1)[1]
    assert "beef: the id of no rollout begins so" in archipel("rollout", "show", "beef", code=1)[1]
    assert "beef: the id of no token begins so" in archipel("access", "revoke", "beef", code=1)[1]
    for typed in ("4f2", "t1", "4F2A", 33 * "0"):
        assert "32 hexadecimal digits, or its first four or more" in archipel("task", "show", typed, code=1)[1]
