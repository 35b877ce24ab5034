"""A device that is killed in a round over neighbours and started again masks nothing twice and answers nothing twice.

The server asks it anew, and somebody puts older files of the round back, or those of another one. (Whoever puts back
the whole folder of a device, its journal with it, makes it forget what it said: SECURITY.md names that.)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from archipel.protocol.secagg_plus.messages import Partners, Question, pack
from tests.client.rounds.neighbours.test_left import file, left_cleanly, vault
from tests.client.rounds.neighbours.world import NeighbourWorld, opened
from tests.support.scripted_server import Reply


@pytest.fixture
def world(tmp_path: Path) -> Iterator[NeighbourWorld]:
    with opened(tmp_path) as made:
        yield made


def test_secrets_from_before_the_masking_are_not_used_after_it(world: NeighbourWorld) -> None:
    """As a backup that was put back has them: with them another vector could be masked."""
    world.killed_at("shared")
    before_masking = file(world, ".secrets").read_bytes()
    vector = file(world, ".vector").read_bytes()
    world._killed(lambda kill: world._at_event(world.agent, "uploaded", kill))
    path = file(world, ".secrets")
    path.write_bytes(before_masking)
    path.with_suffix(".vector").write_bytes(vector)
    asked = world.asked("partners")
    assert world.finish().kind == "dropped"
    # It does not come so far as to mask: the masked bytes, which nobody replaces, would stop it there only.
    assert "older than the masked bytes" in world.agent.rounds[-1].reason
    assert world.asked("partners") == asked == 1
    assert len(set(world.server.bodies["update"])) == 1
    assert world.asked("question") == 0
    world.check_erased()


@pytest.mark.sampled(every=3)
def test_secrets_of_another_round_or_device_are_not_used(world: NeighbourWorld, tmp_path: Path) -> None:
    world.killed_at("shared")
    path, key = file(world, ".secrets"), vault(world)
    with opened(tmp_path / "another") as another:
        another.killed_at("shared")
        theirs = vault(another).read(file(another, ".secrets"))
    assert theirs is not None
    key.write(path, theirs)
    left_cleanly(world, told=1)


def test_another_question_than_the_confirmed_one_is_not_answered(world: NeighbourWorld) -> None:
    """The server asks anew after a restart, with one device less."""
    world.killed_at("confirmed")
    question = world.server.questions[world.server.place]
    other = Question(present=question.present[1:], left=question.present[:1])
    world.answers("question", lambda reply: Reply(200, pack(other)))
    world.finish()
    world.check_committed()


def test_other_partners_after_a_restart_mask_nothing_twice(world: NeighbourWorld) -> None:
    world.killed_at("masked")
    gone = Partners(gone=[world.server.roster.drawn[world.server.place][0]], others=[], mask_keys=b"")
    world.answers("partners", lambda reply: Reply(200, pack(gone)))
    world.finish()
    world.check_committed()
