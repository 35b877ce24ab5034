"""What lines of the log look like, and which statements are called slow."""

from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import Iterator

import pytest
from sqlalchemy import text

from archipel.server.database.engine import Database
from archipel.server.telemetry import log_lines
from archipel.server.telemetry.slow_queries import log_slow_queries
from tests.server.rounds.test_plain_rounds import update
from tests.support.world import World


@pytest.fixture(params=["text", "json"])
def written(request: pytest.FixtureRequest) -> Iterator[tuple[str, io.StringIO]]:
    """The format, and what the program `archipel` logs in it."""
    stream, log = io.StringIO(), logging.getLogger("archipel")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(log_lines.formatter(request.param))
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield request.param, stream
    log.removeHandler(handler)
    log.setLevel(before)


def test_a_message_is_one_line_whatever_is_in_it(written: tuple[str, io.StringIO]) -> None:
    format_of, stream = written
    began = time.time()
    with log_lines.about(round_id="a" * 32):
        logging.getLogger("archipel.test").warning("of a\nsecond\u2028line\x1b[31m %s", "and more")
    logging.getLogger("archipel.test").warning("about nothing")
    first, second = stream.getvalue().splitlines()
    if format_of == "json":
        line = json.loads(first)
        assert began - 0.01 <= line.pop("time") <= time.time() + 0.01
        assert line == {
            "level": "warning", "logger": "archipel.test", "message": "of a\nsecond\u2028line\x1b[31m and more",
            "round_id": "a" * 32,
        }  # fmt: skip
        assert json.loads(second).keys() == {"time", "level", "logger", "message"}
    else:
        assert first.endswith(f"archipel.test: of a\\x0asecond\\x2028line\\x1b[31m and more [round_id {'a' * 32}]")
        assert second.endswith("archipel.test: about nothing")


@pytest.mark.sampled(every=6)
def test_requests_and_rounds_are_named(
    world: World, written: tuple[str, io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    format_of, stream = written
    world.create_task(privacy="plain", threshold=None, cohort=3, min_cohort=3, deadlines={"updating": 5})
    devices = world.add_devices(3)
    world.start_round(devices)
    round_id = devices[0].plan.round_id if devices[0].plan else ""
    devices[0].updating(**update(0))
    world.clock.now += 6
    world.settle()
    with world.app.test_client() as client, monkeypatch.context() as broken:
        broken.setattr(Database, "read", None)  # an error that nobody expects
        answer = client.get("/v1/health")
    assert answer.status_code == 500
    request_id = answer.headers["X-Request-Id"]
    assert answer.get_json()["request_id"] == request_id
    shown = stream.getvalue()
    if format_of == "text":
        assert f"round {round_id}: failed" in shown
        assert f"request {request_id} failed" in shown
        return
    lines = [json.loads(line) for line in shown.splitlines()]
    assert {line.get("round_id") for line in lines if line["logger"] == "archipel.coordinator"} == {round_id}
    [failed] = [line for line in lines if line["level"] == "error"]
    assert failed["request_id"] == request_id
    assert "TypeError" in failed["error"]
    requests = [json.loads(line) for line in world.settings.request_log.read_text().splitlines()]
    of_round = [line for line in requests if line["round_id"] == round_id]
    assert [line["path"] for line in of_round] == [f"/v1/rounds/{round_id}/update"]
    assert requests[-1]["request_id"] == request_id


def test_slow_statements_are_logged_without_their_parameters(
    tmp_path: object, written: tuple[str, io.StringIO]
) -> None:
    database = Database(f"sqlite:///{tmp_path}/db")
    log_slow_queries(database, 50)

    def wait(seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    with database.read() as session:
        session.connection().connection.driver_connection.create_function("wait", 1, wait)
        session.scalar(text("SELECT wait(:seconds)"), {"seconds": 0.0101})
        session.scalar(text("SELECT\n  wait(:seconds)"), {"seconds": 0.0607})
    database.dispose()
    [line] = [line for line in stream_lines(written) if "slow query" in line]
    assert "SELECT wait(?)" in line
    assert "0.0607" not in line
    number = int(line.split("slow query: ")[1].split(" ms")[0])
    assert 60 <= number < 5000


def stream_lines(written: tuple[str, io.StringIO]) -> list[str]:
    return written[1].getvalue().splitlines()
