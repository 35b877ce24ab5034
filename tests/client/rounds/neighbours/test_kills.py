"""Killed before or after any fsync, rename or deletion of a round over neighbours, the agent goes on with it.

What the disk has at that point is all that the next agent gets. Whatever was sent for a step is sent again as it was,
the device's update is in the sum, and at the end no secret of the round is left.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.client.rounds.neighbours.world import opened

POINTS = {"malicious": 150, "semi-honest": 140}
"""More than a round has after its training, before and after each; a kill beyond the last one kills nobody."""
EVENTS = ("trained", "advertised", "shared", "masked", "uploaded", "confirmed", "unmasked", "committed")


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("server", POINTS)
def test_the_points_are_fewer_than_counted_for(tmp_path: Path, server: str) -> None:
    with opened(tmp_path, server) as world:
        assert not world.killed_after(10**6)
        print(server, world.passed)
        assert 0.7 * POINTS[server] < world.passed < POINTS[server]
        world.check_committed()


@pytest.mark.parametrize(
    "event", [pytest.param(name, marks=pytest.mark.slow) for name in EVENTS[1::2]] + [*EVENTS[::2]]
)
@pytest.mark.sampled(every=6)
def test_killed_at_an_event(tmp_path: Path, event: str) -> None:
    with opened(tmp_path) as world:
        world.killed_at(event)
        world.finish()
        world.check_committed()
        world.server.forget()
        assert world.round().kind == "took_part"
        world.check_committed(rounds=2)


@pytest.mark.sampled(every=41)
@pytest.mark.parametrize(("server", "kill"), [(name, kill) for name in POINTS for kill in range(1, POINTS[name])])
def test_killed_at_any_point(tmp_path: Path, server: str, kill: int) -> None:
    with opened(tmp_path, server) as world:
        world.killed_after(kill)
        world.finish()
        world.check_committed()


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("apart", [23, pytest.param(31, marks=pytest.mark.slow)])
def test_killed_again_and_again(tmp_path: Path, apart: int) -> None:
    """Each agent lives for a few points only."""
    with opened(tmp_path) as world:
        kills = 0
        alive = world.killed_after(apart)
        while alive and kills < 20:
            kills += 1
            alive = world.killed_again_after(apart)
        assert kills >= 4
        world.finish()
        world.check_committed()
