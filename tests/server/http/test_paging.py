"""Lists come in pages that new rows do not shift."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.world import World


def walk(world: World, path: str, limit: int) -> list[dict[str, Any]]:
    found, after = [], ""
    while True:
        status, page = world.operator("GET", f"{path}{'' if '?' in path else '?'}limit={limit}{after}")
        assert status == 200, page
        assert len(page["items"]) <= limit
        found += page["items"]
        if page["next"] is None:
            return found
        after = f"&after={page['next']}"


@pytest.mark.sampled(every=4)
def test_tasks_newest_first_each_once(world: World) -> None:
    made = []
    for number in range(8):
        world.clock.now += number % 3  # some at the same time
        made.append(world.create_task(name=f"t{number}"))
    for limit in (1, 3, 8, 500):
        found = walk(world, "/v1/tasks", limit)
        assert sorted(each["task_id"] for each in found) == sorted(each["task_id"] for each in made)
        times = [each["created"] for each in found]
        assert times == sorted(times, reverse=True)


def test_a_new_task_does_not_shift_the_next_page(world: World) -> None:
    made = []
    for number in range(4):
        world.clock.now += 1
        made.append(world.create_task(name=f"t{number}")["task_id"])
    first = world.operator("GET", "/v1/tasks?limit=2")[1]
    world.clock.now += 1
    world.create_task(name="late")
    second = world.operator("GET", f"/v1/tasks?limit=2&after={first['next']}")[1]
    assert [each["task_id"] for each in [*first["items"], *second["items"]]] == made[::-1]
    assert second["next"] is None


@pytest.mark.sampled(every=3)
def test_only_ids_that_begin_so(world: World) -> None:
    made = [world.create_task(name=f"t{number}")["task_id"] for number in range(6)]
    for starts in (made[2][:1], made[2][:5], made[2]):
        found = [each["task_id"] for each in walk(world, f"/v1/tasks?starts={starts}&", 1)]
        assert sorted(found) == sorted(each for each in made if each.startswith(starts))
    for wrong in ("", "4F", "%25", "g", "0" * 65):
        assert world.operator("GET", f"/v1/tasks?starts={wrong}")[0] == 400


@pytest.mark.sampled(every=3)
def test_only_the_tasks_that_are_asked_for(world: World) -> None:
    """By each filter alone and by all together; a task that leaves the choice between two pages hides no other."""
    made: list[tuple[str, str, float]] = []
    for number in range(6):
        world.clock.now += 10
        task = world.create_task(name=f"t{number}")["task_id"]
        if number % 3 == 0:
            assert world.operator("POST", f"/v1/tasks/{task}/cancel")[0] == 200
        made.append((task, "cancelled" if number % 3 == 0 else "running", world.clock.now))

    def found(query: str, limit: int = 2) -> list[str]:
        return [each["task_id"] for each in walk(world, f"/v1/tasks?{query}&", limit)]

    for state in ("cancelled", "running", "paused"):
        assert found(f"state={state}") == [task for task, is_in, _ in made[::-1] if is_in == state]
    since = made[3][2]
    assert found(f"since={since}") == [task for task, _, _ in made[:2:-1]]
    assert found(f"since={since}&state=running&kind=training&population=pupils") == [made[5][0], made[4][0]]
    assert found("kind=evaluation") == found("population=nobody") == []
    first = world.operator("GET", "/v1/tasks?state=running&limit=2")[1]
    assert world.operator("POST", f"/v1/tasks/{first['next']}/cancel")[0] == 200
    rest = world.operator("GET", f"/v1/tasks?state=running&limit=2&after={first['next']}")[1]
    assert [each["task_id"] for each in rest["items"]] == [made[2][0], made[1][0]]
    for wrong in ("state=done", "kind=", "since=yesterday", "since=nan", "since=-1", "population=%25"):
        assert world.operator("GET", f"/v1/tasks?{wrong}")[0] == 400, wrong


@pytest.mark.sampled(every=4)
def test_rounds_oldest_first(world: World) -> None:
    task = world.create_task(rounds=3, deadlines={"advertising": 5})
    devices = world.add_devices(5)
    for _ in range(3):
        world.start_round(devices)
        world.clock.now += 6
        world.settle()
    found = walk(world, f"/v1/tasks/{task['task_id']}/rounds", 2)
    assert [each["phase"] for each in found] == ["failed"] * 3
    assert [each["started"] for each in found] == sorted(each["started"] for each in found)
    assert all(len(each["participants"]) == 5 for each in found)
    other = world.create_task(name="other")["task_id"]
    status, answer = world.operator("GET", f"/v1/tasks/{other}/rounds?after={found[0]['round_id']}")
    assert status == 404, answer  # a round, but of another task


@pytest.mark.parametrize(
    ("query", "word"),
    [
        ("limit=0", "limit"),
        ("limit=501", "limit"),
        ("limit=many", "limit"),
        ("limit=1&limit=2", "twice"),
        ("offset=3", "offset"),
        ("after=7", "after"),
        ("after=" + "g" * 32, "after"),
    ],
)
def test_a_wrong_query_is_named(world: World, query: str, word: str) -> None:
    status, answer = world.operator("GET", f"/v1/tasks?{query}")
    assert status == 400, answer
    assert word in answer["detail"]
