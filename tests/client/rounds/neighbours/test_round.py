"""A round over neighbours of a real agent, with real peers."""

from __future__ import annotations

from pathlib import Path

import pytest

from archipel.protocol.messages import CheckIn
from archipel.protocol.sealed import decode
from archipel.protocol.secagg_plus.limits import largest_message
from archipel.protocol.secagg_plus.messages import Inbox, Invitation, Neighbours, Packed, Partners, Question
from tests.client.rounds.neighbours.world import STEPS, NeighbourWorld, opened
from tests.support.scripted_server import Reply

KINDS: dict[str, type[Packed]] = {
    "invitation": Invitation, "neighbours": Neighbours, "dealings": Inbox, "partners": Partners, "question": Question,
}  # fmt: skip


@pytest.mark.sampled(every=6)
def test_the_agents_update_is_in_the_sum(world: NeighbourWorld) -> None:
    outcome = world.round()
    assert outcome.kind == "took_part"
    world.check_committed()
    asked = {step: world.asked(step) for step in STEPS}
    assert asked == dict.fromkeys(STEPS, 1)
    assert world.asked("inclusions") == int(world.server.malicious)
    checked_in = decode("check-in", world.server.bodies["check-in"][0], CheckIn)
    assert checked_in.protocols == ("complete", "neighbours", "neighbours-mlkem")


@pytest.mark.parametrize("step", ["invitation", "neighbours", "dealings", "partners", "question"])
@pytest.mark.sampled(every=6)
def test_what_is_no_message_is_no_answer(tmp_path: Path, step: str) -> None:
    """Garbage, another message, JSON and more bytes than the plan allows: the agent asks once more."""
    with opened(tmp_path) as world:
        assert world.server.begin()
        plan = world.server.plan
        assert plan is not None
        too_long = b"\xc6" + (1 << 30).to_bytes(4, "big") + bytes(largest_message(KINDS[step], plan))
        for wrong in (b"", b"\xc1", b"{}", b"\x90", too_long):
            world.answers(step, lambda reply, wrong=wrong: Reply(200, wrong))
            assert world.round().kind == "took_part"
            assert world.asked(step) == 2
            world.server.forget()
