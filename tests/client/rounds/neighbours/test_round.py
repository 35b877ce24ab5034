"""A round over neighbours of a real agent, with real peers."""

from __future__ import annotations

from archipel.protocol.messages import CheckIn
from archipel.protocol.sealed import decode
from tests.client.rounds.neighbours.world import STEPS, NeighbourWorld


def test_the_agents_update_is_in_the_sum(world: NeighbourWorld) -> None:
    outcome = world.round()
    assert outcome.kind == "took_part"
    world.check_committed()
    asked = {step: world.asked(step) for step in STEPS}
    assert asked == dict.fromkeys(STEPS, 1)
    assert world.asked("inclusions") == int(world.server.malicious)
    checked_in = decode("check-in", world.server.bodies["check-in"][0], CheckIn)
    assert checked_in.protocols == ("complete", "neighbours")
