"""`archipel task watch` says in few lines what happens in a task."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from archipel.cli.federation.watch_lines import SLOW_SECONDS, WatchLines, size_text, status
from archipel.protocol.operator.progress import TaskProgress
from tests.server.rounds.test_evaluating import PLAIN, evaluate
from tests.server.rounds.test_leaving import leave
from tests.server.rounds.test_plain_rounds import update
from tests.support.fixtures.server import *  # noqa: F403
from tests.support.world import World


def ask(world: World, task: str) -> TaskProgress:
    status_code, answer = world.transport(
        "GET", f"/v1/tasks/{task}/progress", None, {"Authorization": f"Bearer {world.operator_token}"}
    )
    assert status_code == 200
    return msgspec.json.decode(answer, type=TaskProgress)


@pytest.mark.sampled(every=6)
def test_three_rounds_in_twenty_lines(world: World) -> None:
    """With a device that leaves each round, an evaluation of each version, and looks all the time."""
    settings: dict[str, Any] = {**PLAIN, "cohort": 5, "min_cohort": 3}
    task = world.create_task(rounds=3, evaluate_every=1, **settings)["task_id"]
    devices = world.add_devices(5)
    lines, told = WatchLines(), list[str]()

    def look() -> TaskProgress:
        now = ask(world, task)
        told.extend(lines.news(now))
        return now

    look()
    for number in range(1, 4):
        world.clock.now += 300
        for device in devices:
            device.open_session()
        world.start_round(devices)
        look()
        assert leave(devices[number], "data")[0] == 200
        world.clock.now += SLOW_SECONDS
        now = look()
        assert status(now).startswith(f"round {number}, 10 s: updating for 10 s, 0 of 4 updated, until ")
        for place, device in enumerate(devices):
            if place != number:
                device.updating(**update(place))
        world.settle()
        look()
        evaluate(world, devices, 0.5)
        look()
    told.extend(lines.end(ask(world, task)))
    assert len(told) <= 20, told
    assert told[0] == "digits: training over pupils, plain, 0 of 3 rounds"
    text = "\n".join(told)
    for number in range(1, 4):
        gone = devices[number].id[:8]
        assert f"round {number}: began " in text
        assert f"round {number}: updating for 10 s, 0 of 4 updated, until " in text
        assert f"round {number}: committed in 10.0 s, 4 of 5 devices in the sum, " in text
        assert f"  missing 1 of 5: {gone} assigned, it left the round" in text
        assert f"  version {number}: evaluation accuracy 0.75, evaluation loss 0.5" in text
    assert "completed: 3 of 3 rounds in " in text
    assert "devices that failed: it left the round (3 times)" in text
    assert f"model: weights {world.task(task)['model'][:12]} of round 3, " in text


def test_sizes_have_a_unit_that_fits() -> None:
    sizes = {0: "0 B", 999: "999 B", 1000: "1 kB", 1_234_567: "1.23 MB", 10**13: "10 TB"}
    assert {size: size_text(size) for size in sizes} == sizes
