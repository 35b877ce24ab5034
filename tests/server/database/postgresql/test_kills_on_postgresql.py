"""Killed at any durable point with its rows in PostgreSQL, the server loses and doubles nothing there either."""

from __future__ import annotations

import pytest

from tests.server.rounds.kills.test_kills import POINTS, SCENARIOS, run
from tests.support.world import World


@pytest.mark.sampled(every=1604)
@pytest.mark.parametrize(("scenario", "kill"), [(name, kill) for name in SCENARIOS for kill in range(1, POINTS[name])])
def test_killed_at_any_point_it_loses_and_doubles_nothing(world: World, scenario: str, kill: int) -> None:
    server = run(world, scenario, kill)
    assert server.died or server.points < kill
