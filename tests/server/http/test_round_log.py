"""What the server's log says about a round, for admins."""

from __future__ import annotations

import logging

import pytest

from archipel.server.http.api.round_log import MOST_BYTES, MOST_LINES
from archipel.server.telemetry.log_lines import TextLines, about
from tests.support.visitors import Visitor, access_token
from tests.support.world import World


def started(world: World) -> str:
    task = world.create_task()
    world.start_round(world.add_devices(5))
    (row,) = world.rounds(task["task_id"])
    return str(row["round_id"])


def lines(world: World, round_id: str) -> list[str]:
    status, answer = world.operator("GET", f"/v1/rounds/{round_id}/log")
    assert status == 200, answer
    found: list[str] = answer["lines"]
    return found


@pytest.mark.sampled(every=3)
def test_lines_about_a_round_with_their_tracebacks_and_no_others(world: World) -> None:
    round_id, other = started(world), "f" * 32
    assert lines(world, round_id) == []
    written = []
    for of, error in ((other, "elsewhere"), (round_id, "here"), (other, "elsewhere")):
        record = logging.LogRecord("archipel.server", logging.ERROR, "", 0, f"failed {error}", (), None)
        try:
            raise ValueError(error)
        except ValueError as raised:
            record.exc_info = (ValueError, raised, raised.__traceback__)
        with about(round_id=of):
            written.append(TextLines().format(record))
    world.settings.process_log.write_text("\n".join(written) + "\n")
    assert lines(world, round_id) == written[1].split("\n")
    assert "ValueError: here" in lines(world, round_id)[-1]
    assert world.operator("GET", f"/v1/rounds/{'0' * 32}/log")[0] == 404


def test_of_a_long_log_the_end_is_read(world: World) -> None:
    round_id = started(world)
    line = f"round {round_id}: " + "x" * 1000
    with world.settings.process_log.open("w") as file:
        for number in range(2 * MOST_BYTES // len(line)):
            file.write(f"{line} {number}\n")
    found = lines(world, round_id)
    assert len(found) == MOST_LINES
    assert found[-1].endswith(f" {number}")


@pytest.mark.sampled(every=3)
def test_the_page_of_a_round_shows_it_to_admins_alone(world: World) -> None:
    round_id = started(world)
    world.settings.process_log.write_text(f"round {round_id}: <script>alert(1)</script>\n")
    page = Visitor(world, world.operator_token).page(f"/dashboard/rounds/{round_id}")
    assert "&lt;script&gt;alert(1)" in page
    for role in ("operator", "analyst", "auditor"):
        other = Visitor(world, access_token(world, role)[0])
        assert "Log of the server" not in other.words(f"/dashboard/rounds/{round_id}")
