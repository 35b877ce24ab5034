"""A task of the upstream server ends at an edge when it has ended above, however that was, and not before."""

from __future__ import annotations

from pathlib import Path

import pytest

from archipel.errors import RefusedError, SessionRefusedError
from archipel.protocol.messages import RoundTask
from archipel.protocol.operator.tasks import TaskInfo
from archipel.server.database.site_tables import SiteRound as Row
from archipel.server.database.tables import Round, Task
from archipel.server.database.task_requests import request_of
from archipel.server.rounds.sites.ending import follow_task
from tests.edge.test_rounds import uplink
from tests.support.edge_world import TIMES, ComputedSite, EdgeWorld, open_edge_world


def begin(world: EdgeWorld, **changes: object) -> TaskInfo:
    for number in (1, 2):
        world.device(number)
    world.site("b", ComputedSite([3, 4, 5]))
    world.site("c", ComputedSite([6, 7]))
    uplink(world)
    return world.task(min_cohort=3, **changes)


def at_edge(world: EdgeWorld, task: TaskInfo) -> TaskInfo:
    return world.edge_operator.tasks.get(task.task_id)


def is_there(world: EdgeWorld, task: TaskInfo) -> bool:
    return task.task_id in [each.task_id for each in world.edge_operator.tasks.list()]


@pytest.mark.sampled(every=8)
def test_it_shows_the_rounds_of_the_root_and_ends_when_the_last_is_counted(tmp_path: Path) -> None:
    with open_edge_world(tmp_path) as world:
        task = begin(world, rounds=2)
        with world.running():
            world.until(lambda: is_there(world, task))
            begun = at_edge(world, task)
            assert (begun.state, begun.rounds) == ("running", 2)
            world.until(lambda: at_edge(world, task).state != "running")
        assert world.operator.tasks.get(task.task_id).state == "completed"
        ended = at_edge(world, task)
        assert (ended.state, ended.reason) == ("completed", "the task of the upstream server is completed")
        counted = [row for row in world.rows() if row.state == "counted"]
        assert (ended.rounds, ended.rounds_committed) == (2, len(counted))
        [entry] = [each for each in world.edge_operator.audit.list() if each.action == "task.completed"]
        assert (entry.actor, entry.subject) == ("upstream", task.task_id)


@pytest.mark.sampled(every=4)
def test_one_that_is_cancelled_above_ends_with_its_round(tmp_path: Path) -> None:
    with open_edge_world(tmp_path) as world:
        task = begin(world, deadlines={**TIMES, "advertising": 60.0})
        with world.running():
            world.until(lambda: [row for row in world.rows() if row.state == "open"])
            world.operator.tasks.cancel(task.task_id)
            world.until(lambda: at_edge(world, task).state != "running")
            own = world.rows()[-1].local_round or ""
            world.until(lambda: world.edge_operator.rounds.get(own).ended is not None)
        ended = at_edge(world, task)
        assert (ended.state, ended.reason) == ("cancelled", "the task of the upstream server was cancelled")
        assert [row.state for row in world.rows()] == ["given_up"]
        assert world.edge_operator.rounds.get(own).phase == "failed"


@pytest.mark.sampled(every=6)
def test_an_upstream_that_does_not_know_the_task_any_more_leaves_it_to_the_operator(tmp_path: Path) -> None:
    with open_edge_world(tmp_path) as world:
        task = begin(world, rounds=50)
        with world.running():
            world.until(lambda: [row for row in world.rows() if row.state == "counted"])
        edge = world.agents[-1]
        _, session, _ = edge._connect()
        site = edge._device.site
        assert site is not None
        with world.edge._services.database.write() as other:
            other.add(Row(round_id="f" * 32, task_id=task.task_id, plan=b"{}", state="given_up", sum_by=0.0,
                          created=4e9))  # fmt: skip
        site.follow(session)
        assert at_edge(world, task).state == "running"
        assert world.edge_operator.tasks.cancel(task.task_id).state == "cancelled"


@pytest.mark.sampled(every=6)
def test_a_sum_that_is_counted_and_not_committed_yet_keeps_the_task(tmp_path: Path) -> None:
    with open_edge_world(tmp_path) as world:
        task = begin(world, rounds=3)
        with world.running():
            world.until(lambda: is_there(world, task) and at_edge(world, task).rounds_committed)
        services = world.edge._services
        world.edge.stop()
        last = next(row for row in world.rows() if row.state == "counted")
        with services.database.write() as session:
            session.query(Row).filter(Row.round_id != last.round_id).delete()
        for state in ("completed", "cancelled", "failed"):
            told = RoundTask(task_id=task.task_id, state=state, rounds=7, committed=7)  # type: ignore[arg-type]
            for was, ended in (("summed", None), ("counted", None), ("wanted", 1.0)):
                with services.database.write() as session:
                    session.get_one(Row, last.round_id).state = was
                    session.get_one(Round, last.local_round).ended = ended
                    session.get_one(Task, task.task_id).state = "running"
                assert not follow_task(services, told)
            with services.database.write() as session:
                session.get_one(Row, last.round_id).state = "counted"
            assert follow_task(services, told)
            assert follow_task(services, told)
            with services.database.read() as session:
                ended_task = session.get_one(Task, task.task_id)
                assert (ended_task.state, request_of(ended_task).rounds) == (state, 7)
        world.edge.start()


@pytest.mark.sampled(every=6)
def test_only_members_of_a_round_are_told_of_its_task(tmp_path: Path) -> None:
    with open_edge_world(tmp_path) as world:
        task = begin(world)
        outsider = world.site("d", ComputedSite([8, 9]))
        with world.running(world.agents[:-1]):
            world.until(lambda: world.operator.tasks.get(task.task_id).state != "running")
        [last] = [each for each in world.rounds(task) if each.phase == "committed"]
        _, session, _ = outsider._connect()
        with pytest.raises(RefusedError, match="not in the round") as refused:
            session.call("GET", f"/v1/rounds/{last.round_id}/task", RoundTask)
        assert not isinstance(refused.value, SessionRefusedError)
        _, session, _ = world.agents[-2]._connect()
        told = session.call("GET", f"/v1/rounds/{last.round_id}/task", RoundTask)
        assert (told.task_id, told.state, told.rounds, told.committed) == (task.task_id, "completed", 1, 1)
