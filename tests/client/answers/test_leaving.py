"""When an agent says that it leaves a round, and that it may be killed meanwhile."""

from __future__ import annotations

import shutil

import pytest

from archipel.protocol import messages as m
from archipel.protocol.sealed import encode
from tests.client.answers.world import NO_ANSWER, World
from tests.support.scripted_server import Reply, before


@pytest.mark.parametrize("heard", [True, False])
def test_killed_while_it_leaves(world: World, heard: bool) -> None:
    """Where the server heard it there is no plan for it any more, else the same one again, which it refuses again."""
    world.restart(allow_plain=False)
    folder, copy = world.agent.config.folder, world.folder / "copy"

    def killed(reply: Reply) -> Reply:
        shutil.copytree(folder, copy)
        return reply

    world.answers("leave", killed)
    assert world.round(privacy="plain").kind == "refused"
    world.agent.close()
    shutil.rmtree(folder)
    copy.rename(folder)
    world.agent = world.start(allow_plain=False)
    assert [entry.step for entry in world.agent.rounds] == ["assigned"]
    world.server.forget()
    if heard:
        world.server.phase = "committed"
    assert world.agent.run_once().kind == ("waiting" if heard else "refused")
    assert world.asked("leave") == (0 if heard else 1)
    assert world.asked("update") == world.asked("advertisement") == 0
    assert [(entry.step, entry.result) for entry in world.agent.rounds] == [
        ("closed", "dropped" if heard else "refused")
    ]
    world.works()


def test_after_its_first_message_it_says_so_where_a_message_contradicts_another_one(world: World) -> None:
    world.answers("inbox", lambda reply: Reply(200, encode(m.Shares(shares=[]))))
    assert world.round().kind == "dropped"
    assert world.asked("leave") == 1


@pytest.mark.parametrize("status", [410, 404])
def test_it_says_nothing_to_a_server_that_knows(world: World, status: int) -> None:
    world.answers("shares", before(status))
    assert world.round().kind == "dropped"
    assert world.asked("leave") == 0


def test_it_says_nothing_to_a_server_that_does_not_answer(world: World) -> None:
    world.restart(patience=0.05)
    world.answers("shares", *[NO_ANSWER[0]] * 99)
    assert world.round().kind == "dropped"
    assert world.asked("leave") == 0


def test_after_a_restart_it_says_that_it_has_lost_the_round(world: World) -> None:
    world.interrupted("shared")
    world.server.forget()
    assert world.agent.run_once().kind == "waiting"
    assert world.asked("leave") == 1
    assert [entry.result for entry in world.agent.rounds] == ["dropped"]


def test_a_stored_update_is_sent_instead(world: World) -> None:
    """The peers can still unmask it."""
    world.interrupted("masked")
    world.server.forget()
    world.agent.run_once()
    assert (world.asked("leave"), world.asked("update")) == (0, 1)
