"""One error shape for everything that can go wrong, and the request log."""

from __future__ import annotations

import json
import sqlite3

import msgspec
import pytest
from sqlalchemy.exc import OperationalError
from werkzeug.wrappers import Response

from archipel.errors import ApiError, RefusalError
from archipel.protocol.messages import Problem
from archipel.protocol.operator.tasks import TaskRequest
from archipel.protocol.problems import KINDS
from archipel.server.http.field_problems import named
from archipel.server.http.problems import STATUS
from tests.support.world import World


def problem(response: Response, status: int, kind: str) -> Problem:
    assert response.status_code == status, response.get_data()
    assert response.mimetype == "application/problem+json"
    found = msgspec.json.decode(response.get_data(), type=Problem)
    assert (found.type, found.status) == (f"urn:archipel:problem:{kind}", status)
    assert found.detail
    assert found.title
    assert found.request_id == response.headers["X-Request-Id"]
    return found


def test_every_refusal_has_a_status() -> None:
    """ApiError brings its own; all others need a line in STATUS of archipel/server/http/problems.py."""
    kinds = set(RefusalError.__subclasses__())
    assert len(kinds) > 4
    assert kinds - {ApiError} == set(STATUS)
    assert set(STATUS.values()) <= set(KINDS)


def test_not_found_and_wrong_method(world: World) -> None:
    client = world.app.test_client()
    problem(client.get("/v1/nothing"), 404, "not_found")
    for path in ("/v1/tasks/not-an-id", "/v1/tasks/0000", "/v1/tasks/%C3%A9"):
        found = problem(client.get(path), 404, "not_found")
        assert found.detail.endswith(": this path names nothing here; ids have 32 hexadecimal digits, digests 64")
    assert found.detail.startswith("/v1/tasks/é: ")
    assert len(problem(client.get("/v1/" + "x" * 5000), 404, "not_found").detail) < 400
    wrong = client.delete("/v1/health")
    problem(wrong, 405, "unsupported")
    assert set(wrong.headers["Allow"].split(", ")) == {"GET", "HEAD"}
    problem(client.options("/v1/health"), 405, "unsupported")


def test_a_body_that_cannot_be_decoded(world: World) -> None:
    for body, said, pointer in (
        (b"", "Input data was truncated", None),
        (b"{", "Input data was truncated", None),
        (b"[]", "Expected `object`, got `array`", "#"),
        (b"{}", "Object missing required field `device_id`", "#/device_id"),
        (b'{"device_id": "XYZ"}', "$.device_id", "#/device_id"),
        (b'{"device_id": "' + b"0" * 32 + b'", "ex~/ a": 1}', "Object contains unknown field `ex~/ a`", "#/ex~0~1%20a"),
        (b"\xff", "JSON is malformed", None),
        (b"[" * 100_000, "", "#"),
    ):
        found = problem(world.app.test_client().post("/v1/challenges", data=body), 400, "bad_request")
        assert found.detail.startswith("the body is not a ChallengeRequest: ")
        assert said in found.detail
        assert [each.pointer for each in found.errors] == ([] if pointer is None else [pointer]), body


@pytest.mark.sampled(every=3)
def test_the_field_is_named(world: World) -> None:
    """Also of what a handler finds, and of query strings; a text that only looks like a field's name is none."""
    client = world.app.test_client()
    headers = {"Authorization": f"Bearer {world.operator_token}"}
    asked = {"name": "a", "population": "staff", "bundle": world.publish(), "rounds": 1, "cohort": 3, "min_cohort": 4}
    found = problem(client.post("/v1/tasks", json=asked, headers=headers), 422, "unprocessable")
    assert [each.pointer for each in found.errors] == ["#/cohort"], found
    assert found.errors[0].detail.startswith("3 is below min_cohort 4")
    asked["deadlines"] = {"masking": "soon"}
    found = problem(client.post("/v1/tasks", json=asked, headers=headers), 400, "bad_request")
    assert [each.pointer for each in found.errors] == ["#/deadlines"], found
    found = problem(client.get("/v1/tasks?limit=many", headers=headers), 400, "bad_request")
    assert [(each.parameter, each.pointer) for each in found.errors] == [("limit", "")]
    for text in ("no such device: 12", "cohort", "other: it is wrong", "my cohort: it is wrong", "cohort:"):
        assert named(text, TaskRequest) == []
    asked |= {"deadlines": {}, "hyperparameters": {"rate": 0.1}, "goal": 9}
    found = problem(client.post("/v1/tasks", json=asked, headers=headers), 422, "unprocessable")
    assert [each.pointer for each in found.errors] == ["#/cohort", "#/goal"], found
    first, *mistakes = found.detail.splitlines()
    assert first == "the task is not possible: 3 mistakes"
    for text, words in zip(mistakes, ("cohort: 3 is below", "goal: 9 is not", "'rate'"), strict=True):
        assert words in text
    (inner,) = named("deadlines.masking: 0 seconds", TaskRequest)
    assert (inner.pointer, inner.detail) == ("#/deadlines/masking", "0 seconds")


def test_a_body_that_is_too_large(world: World) -> None:
    body = b" " * (world.settings.max_json_bytes + 1)
    problem(world.app.test_client().post("/v1/challenges", data=body), 413, "too_large")


@pytest.mark.sampled(every=3)
def test_an_unexpected_error_tells_nothing_but_its_request_id(world: World, caplog: pytest.LogCaptureFixture) -> None:
    # An unreadable plan in the database: nothing that a caller can be blamed for.
    task = world.create_task()
    devices = world.add_devices(5)
    world.start_round(devices)
    with world.services.database.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE rounds SET plan = X'00'")
    headers = {"Authorization": f"Bearer {devices[0].token}"}
    response = world.app.test_client().post("/v1/check-ins", data=b"{}", headers=headers)
    found = problem(response, 500, "internal")
    assert "plan" not in found.detail
    assert found.errors == []
    assert found.request_id in caplog.text
    assert task["task_id"] not in response.text


@pytest.mark.parametrize(
    ("code", "said"),
    [(sqlite3.SQLITE_BUSY, "the database is busy"), (sqlite3.SQLITE_FULL, "the server's disk is full")],
)
def test_errors_that_pass_say_when_to_try_again(world: World, code: int, said: str) -> None:
    error = sqlite3.OperationalError("stopped")
    error.sqlite_errorcode = code
    wrapped = OperationalError("SELECT 1", None, error)
    with world.app.test_request_context("/v1/health"):
        world.app.preprocess_request()
        response = world.app.make_response(world.app.handle_user_exception(wrapped))
        response = world.app.process_response(response)
    found = problem(response, 503, "unavailable")
    assert said in found.detail
    assert response.headers["Retry-After"] == "1"


def test_health_says_what_is_wrong(world: World) -> None:
    client = world.app.test_client()
    assert client.get("/v1/health").get_json()["status"] == "ok"
    (world.settings.blob_folder / "incoming").rmdir()
    assert "incoming" in problem(client.get("/v1/health"), 503, "unavailable").detail


def test_the_request_log(world: World) -> None:
    (device,) = world.add_devices(1)
    device.call("POST", "/v1/check-ins", b"{}")
    client = world.app.test_client()
    client.get("/v1/nothing?secret=1", headers={"Authorization": f"Bearer {device.token}"})
    text = world.settings.request_log.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [(line["method"], line["path"], line["status"]) for line in lines] == [
        ("POST", "/v1/devices", 200),
        ("POST", "/v1/challenges", 200),
        ("POST", "/v1/sessions", 200),
        ("POST", "/v1/check-ins", 200),
        ("GET", "/v1/nothing", 404),
    ]
    assert lines[3]["device"] == device.id
    assert lines[0]["device"] is None
    assert lines[3]["bytes_received"] == len(b"{}")
    assert all(line["bytes_sent"] > 0 and line["ms"] >= 0 and line["time"] > 0 for line in lines)
    assert device.token not in text
    assert "secret" not in text
