"""Killed before or after any durable step, an edge server's uplink or coordinator goes on, and every sum is right.

Whatever the kill leaves: the root's version is the mean of exactly the devices of the sites in it, an edge's devices
are in it once or not at all, and for one round of the root the edge has one round of its own at most.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import func, select

from archipel.server.database.tables import Round
from tests.edge.kills.victim import Victim, Who
from tests.support.edge_world import ComputedSite, EdgeWorld, open_edge_world

POINTS: dict[Who, int] = {"uplink": 260, "coordinator": 90}
"""More than each has; a kill beyond the last one kills nobody."""
EVERY = 131
"""Each so manieth point is in the short suite."""


def run(world: EdgeWorld, who: Who, kill: int) -> int:
    """One round, with the process of `who` killed. Returns the points that it passed, 0 where it died."""
    devices = [world.device(number) for number in (1, 2)]
    world.site("b", ComputedSite([3, 4, 5]))
    world.site("c", ComputedSite([6, 7]))
    config = world.uplink_config()
    values = {name: getattr(config, name) for name in config.__struct_fields__ if name != "attributes"}
    token = world.write_token()
    task = world.task()
    victims = {each: Victim(each, world.edge.settings, values, token, kill if each == who else 0)
               for each in POINTS}  # fmt: skip
    try:
        with world.running():

            def over() -> bool:
                if not victims[who].alive:
                    assert victims[who].died()
                    victims[who] = Victim(who, world.edge.settings, values, token, 0)
                return world.operator.tasks.get(task.task_id).state != "running"

            world.until(over, 90.0)
            # The edge and its devices learn of it.
            world.until(lambda: over() and all(row.state in ("counted", "given_up") for row in world.rows()))
            world.until(lambda: over() and all(entry.step == "closed" for agent in devices for entry in agent.rounds))
            world.until(lambda: over() and all(each.state == "completed" for each in world.edge_operator.tasks.list()))
        points = {name: victim.stop() for name, victim in victims.items()}
    finally:
        for victim in victims.values():
            victim.close()
    _check(world, task)
    return points[who]


def _check(world: EdgeWorld, task: object) -> None:
    info = world.operator.tasks.list()
    [done] = [each for each in info if each.levels]
    assert done.state == "completed"
    [above] = [each for each in world.rounds(done) if each.phase == "committed"]
    numbers = {"b": [3, 4, 5], "c": [6, 7]}
    ids = {agent.device_id: numbers[agent.config.folder.name.removeprefix("site-")]
           for agent in world.agents if agent.config.folder.name.startswith("site-")}  # fmt: skip
    counted = [number for device in above.survivors for number in ids.get(device, [1, 2])]
    np.testing.assert_array_equal(world.weights(done), world.averaged(sorted(counted)))
    rows = world.rows()
    assert len({row.round_id for row in rows}) == len(rows)
    served = [row.local_round for row in rows if row.local_round is not None]
    with world.edge._services.database.read() as session:
        assert session.scalar(select(func.count()).select_from(Round)) == len(served)
        phases = {each.round_id: each.phase for each in session.scalars(select(Round))}
    for row in rows:
        if row.local_round is not None:
            assert phases[row.local_round] == ("committed" if row.state == "counted" else "failed")
        # What the edge believes to be counted is.
        assert row.state != "counted" or (row.round_id == above.round_id and 1 in counted)
    for agent in world.agents[:2]:
        results = [entry.result for entry in agent.rounds]
        assert results.count("took_part") == sum(row.state == "counted" for row in rows)
        assert len({entry.origin for entry in agent.rounds}) == len(agent.rounds)


@pytest.mark.slow
@pytest.mark.parametrize("who", list(POINTS))
def test_how_many_points_there_are(tmp_path: Path, who: Who) -> None:
    with open_edge_world(tmp_path, coordinates=False) as world:
        points = run(world, who, 0)
        assert 10 < points < POINTS[who]
        [row] = world.rows()
        assert row.state == "counted"


@pytest.mark.parametrize(
    ("who", "kill"),
    [
        pytest.param(who, kill, marks=() if kill % EVERY == 7 else pytest.mark.slow)
        for who, points in POINTS.items()
        for kill in range(1, points)
    ],
)
@pytest.mark.sampled(every=8)
def test_a_kill_at_any_point(tmp_path: Path, who: Who, kill: int) -> None:
    with open_edge_world(tmp_path, coordinates=False) as world:
        run(world, who, kill)
