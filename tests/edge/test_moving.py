"""Devices move between the edge servers of one root, and take part in each of its rounds once."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from archipel.client import Agent
from archipel.errors import ClientError
from archipel.protocol.identity import EnrolmentToken, root_of
from archipel.server.database.site_tables import SiteRound as Row
from archipel.server.database.tables import Task
from tests.edge.test_rounds import uplink
from tests.support.edge_world import ComputedSite, EdgeWorld, open_edge_world
from tests.support.tree import PATIENT, QUICK


def second_edge(world: EdgeWorld) -> None:
    """Another edge below the root, with its uplink."""
    from archipel.client import AgentConfig
    from archipel.edge.site import EdgeSite
    from archipel.edge.uplink import agent_config

    server = world.add_edge("ward", cohort=3)
    upstream = server.settings.upstream
    assert upstream is not None
    config = agent_config(server._services, upstream)
    values = {name: getattr(config, name) for name in config.__struct_fields__ if name != "attributes"}
    quick = {name: QUICK[name] for name in ("max_wait", "pause_seconds", "backoff")}
    agent = Agent(
        AgentConfig(**{**values, **quick}), examples=dict, on_event=world.events.append,
        site=EdgeSite(server._services, upstream),
    )  # fmt: skip
    agent.enrol(world.token("root", "hospitals", "aggregator"))
    world.agents.append(agent)


def ward_token(world: EdgeWorld) -> EnrolmentToken:
    return world.token("ward", "patients-of-ward", root=root_of(world.token("root", "hospitals", "aggregator")))


@pytest.mark.slow
def test_a_device_that_moves_counts_where_it_is_and_comes_back(tmp_path: Path) -> None:
    with open_edge_world(tmp_path, cohort=3) as world:
        uplink(world)
        second_edge(world)
        mover = world.device(1)
        for number in (2, 3):
            world.device(number)
        for number in (4, 5):
            world.device(number, ward_token(world))
        world.site("c", ComputedSite([6, 7]))
        name = mover.device_id
        for times, token in enumerate((None, ward_token(world), world.device_token()), start=1):
            if token is not None:
                mover.enrol(token)
            assert mover.device_id == name
            _round(world, mover, times)
        assert len({entry.origin for entry in mover.rounds}) == 3


def _round(world: EdgeWorld, mover: Agent, times: int) -> None:
    task = world.task(min_cohort=3, deadlines=PATIENT)
    with world.running():
        world.until(lambda: world.operator.tasks.get(task.task_id).state != "running")
        world.until(lambda: len(mover.rounds) == times and mover.rounds[-1].step == "closed")
    assert world.operator.tasks.get(task.task_id).state == "completed"
    np.testing.assert_array_equal(world.weights(task), world.averaged([1, 2, 3, 4, 5, 6, 7]))
    assert mover.rounds[-1].result == "took_part"


@pytest.mark.slow
def test_a_round_of_the_root_that_the_device_was_in_at_another_edge_is_refused(tmp_path: Path) -> None:
    with open_edge_world(tmp_path, cohort=2) as world:
        uplink(world)
        second_edge(world)
        mover, stays = world.device(1), world.device(2)
        others = [world.device(number, ward_token(world)) for number in (4, 5)]
        world.site("c", ComputedSite([6, 7]))
        task = world.task(min_cohort=3, deadlines=PATIENT)
        with world.running():
            world.until(lambda: world.operator.tasks.get(task.task_id).state != "running")
            world.until(lambda: all(agent.rounds and agent.rounds[-1].step == "closed" for agent in (mover, *others)))
        mover.enrol(ward_token(world))
        # The other edge asks for the same round of the root once more, though it may know that the task is over.
        with world.more["ward"]._services.database.write() as session:
            [row] = session.query(Row).filter(Row.state == "counted").all()
            row.state, row.local_round, row.sum_by = "wanted", None, row.sum_by + 60
            session.get_one(Task, row.task_id).state = "running"
        with world.running([mover, *others]):
            world.until(lambda: len(mover.rounds) == 2 and mover.rounds[-1].step == "closed")
        assert mover.rounds[-1].result == "refused"
        assert "this device has been in it" in mover.rounds[-1].reason
        assert stays.rounds[-1].result == "took_part"


@pytest.mark.sampled(every=4)
def test_a_device_moves_only_below_its_root_and_to_its_publishers(tmp_path: Path) -> None:
    with open_edge_world(tmp_path) as world:
        second_edge(world)
        device = world.device(1)
        token = ward_token(world)
        assert token.root is not None
        other = msgspec.structs.replace(token.root, server_key=bytes(32))
        for changes, why in (
            ({"root": other}, "use another folder"),
            ({"root": None}, "use another folder"),
            ({"publisher_keys": [bytes(32)]}, "names none of the publishers"),
        ):
            with pytest.raises(ClientError, match=why):
                device.enrol(msgspec.structs.replace(token, **changes))
        wider = msgspec.structs.replace(token, publisher_keys=[*token.publisher_keys, bytes(32)])
        device.enrol(wider)
        assert device._record is not None
        assert device._record.publisher_keys == token.publisher_keys
        assert device.run_once().kind == "waiting"
