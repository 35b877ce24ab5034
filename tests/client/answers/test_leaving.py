"""An agent that is killed between saying that it leaves a round and noting that it did."""

from __future__ import annotations

import shutil

import pytest

from tests.client.answers.world import World
from tests.support.scripted_server import Reply


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
