"""An upstream server wants to see what few devices of an edge send: it asks for smaller sites, or for one site alone.

The edge checks the plan against the publisher's policy, as a device does; and the devices of a site insist on its
smallest cohort themselves, whatever edge and upstream agree on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from archipel.protocol import policy
from archipel.protocol.messages import RoundPlan
from archipel.server.rounds import opening as rounds_opening
from archipel.server.rounds.sites import mirroring
from archipel.server.rounds.sites import opening as site_opening
from tests.edge.test_rounds import uplink
from tests.support.edge_world import ComputedSite, EdgeWorld, open_edge_world


def asked(world: EdgeWorld) -> None:
    """A round of the root, until it has failed or the edge has refused it."""
    for number in (1, 2, 3):
        world.device(number)
    world.site("b", ComputedSite([4, 5, 6]))
    edge = uplink(world)
    world.task(min_cohort=2, cohort=2)
    with world.running():
        world.until(lambda: edge.rounds and edge.rounds[-1].step == "closed")
    assert edge.rounds[-1].masked is None


def changed(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """The root's plans say something else than its checks have seen."""
    honest = rounds_opening.make_plan

    def made(*arguments: Any, **given: Any) -> RoundPlan:
        return msgspec.structs.replace(honest(*arguments, **given), **changes)

    monkeypatch.setattr(rounds_opening, "make_plan", made)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"site": 1}, "sites of up to 1 devices, the policy has them from 3 to 4"),
        ({"min_cohort": 1, "threshold": 2}, "a cohort of 1 or more, its owner allows 2"),
        ({"site": 4000}, "sites of up to 4000 devices"),
    ],
)
@pytest.mark.sampled(every=4)
def test_a_plan_outside_of_the_policy_is_refused_by_the_edge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], why: str
) -> None:
    sites = msgspec.structs.replace(_sites(), min_site_cohort=3)
    with open_edge_world(tmp_path, cohort=3, min_cohort=3, aggregators=sites) as world:
        changed(monkeypatch, **changes)
        asked(world)
        edge = world.agents[-1]
        assert why in edge.rounds[-1].reason
        assert edge.rounds[-1].result == "refused"
        # Its devices were not asked at all.
        assert [agent.rounds for agent in world.agents[:3]] == [[], [], []]


@pytest.mark.sampled(every=4)
def test_an_edge_that_helps_finds_no_devices_for_a_small_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sites = msgspec.structs.replace(_sites(), min_site_cohort=3)
    with open_edge_world(tmp_path, cohort=3, min_cohort=2, aggregators=sites) as world:
        honest = mirroring.site_request

        def smaller(*arguments: Any) -> Any:
            return msgspec.structs.replace(honest(*arguments), min_cohort=2, cohort=2)

        monkeypatch.setattr(mirroring, "site_request", smaller)
        for module in (site_opening, policy):
            monkeypatch.setattr(module, "check_plan", lambda *arguments: None, raising=False)
        for number in (1, 2):
            world.device(number)
        world.site("b", ComputedSite([4, 5, 6]))
        uplink(world)
        world.task(min_cohort=2, cohort=2)
        devices = world.agents[:2]
        with world.running():
            world.until(lambda: all(agent.rounds and agent.rounds[-1].step == "closed" for agent in devices))
        for agent in devices:
            assert agent.rounds[-1].result == "refused"
            assert "below 3, the smallest site" in agent.rounds[-1].reason


def _sites() -> Any:
    from tests.support.edge_world import SITES

    return SITES
