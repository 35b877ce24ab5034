"""What the pages of the dashboard say, beside what the API answers."""

from __future__ import annotations

import pytest

from archipel.protocol.messages import LeaveRequest
from tests.support.devices import POPULATION
from tests.support.visitors import Visitor, access_token
from tests.support.world import World


@pytest.fixture
def visitor(world: World) -> Visitor:
    return Visitor(world, world.operator_token)


def test_an_empty_server_says_what_to_do_next(visitor: Visitor) -> None:
    words = visitor.words("/dashboard/")
    assert "No task is under way." in words
    assert "No device is enrolled" in words


def test_every_answer_has_the_policy_for_browsers(world: World, visitor: Visitor) -> None:
    for path in ("/dashboard/", "/dashboard/login", "/dashboard/tasks", "/dashboard/nowhere", "/dashboard"):
        headers = visitor.get(path).headers
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["Cache-Control"] == "no-store"
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_pages_have_no_script_or_style_of_their_own(world: World, visitor: Visitor) -> None:
    task = world.create_task()
    for path in ("/dashboard/", "/dashboard/tasks", f"/dashboard/tasks/{task['task_id']}", "/dashboard/login"):
        html = visitor.get(path).get_data(as_text=True)
        assert "style=" not in html
        assert "<style" not in html
        assert "onclick" not in html


@pytest.mark.sampled(every=3)
def test_errors_are_pages(world: World, visitor: Visitor) -> None:
    for path, status in (
        ("/dashboard/nowhere", 404),
        (f"/dashboard/tasks/{'0' * 32}", 404),
        ("/dashboard/logout", 405),
    ):
        answer = visitor.get(path)
        assert (answer.status_code, answer.mimetype) == (status, "text/html"), path
    with world.app.test_client() as client:
        assert client.get("/v1/nowhere").mimetype == "application/problem+json"


def test_files_are_kept_by_browsers_where_the_address_has_their_digest(visitor: Visitor) -> None:
    html = visitor.page("/dashboard/")
    start = html.index("/dashboard/static/dashboard.css?v=")
    address = html[start : html.index('"', start)]
    answer = visitor.get(address)
    assert answer.mimetype == "text/css"
    assert "immutable" in answer.headers["Cache-Control"]
    assert visitor.get("/dashboard/static/dashboard.css?v=0").headers["Cache-Control"] == "no-cache"
    assert visitor.get("/dashboard/static/..%2fpages.py").status_code == 404


@pytest.mark.sampled(every=4)
def test_tasks_by_state_and_page(world: World, visitor: Visitor) -> None:
    for number in range(27):
        world.clock.now += 1
        world.create_task(name=f"task-{number:02}")
    first = visitor.page("/dashboard/tasks")
    assert "task-26" in first
    assert "task-00" not in first
    start = first.index('href="/dashboard/tasks?') + len('href="')
    following = first[start : first.index('"', start)].replace("&amp;", "&")
    assert "task-00" in visitor.page(following)
    assert "There is no such task." in visitor.words("/dashboard/tasks?state=failed")
    assert visitor.get("/dashboard/tasks?state=nonsense").status_code == 422


@pytest.mark.sampled(every=4)
def test_a_task_and_its_rounds(world: World, visitor: Visitor) -> None:
    task = world.create_task(rounds=2, hyperparameters={"lr": 0.125})
    devices = world.add_devices(5)
    world.start_round(devices)
    world.run_to("committed", devices)
    words = visitor.words(f"/dashboard/tasks/{task['task_id']}")
    assert "digits" in words
    assert "lr 0.125" in words
    assert "committed" in words
    (done,) = [each for each in world.rounds(task["task_id"]) if each["phase"] == "committed"]
    assert f"/dashboard/rounds/{done['round_id']}" in visitor.page(f"/dashboard/tasks/{task['task_id']}")


@pytest.mark.sampled(every=3)
def test_a_task_is_paused_resumed_and_cancelled_after_a_question(world: World, visitor: Visitor) -> None:
    task = world.create_task()
    page = f"/dashboard/tasks/{task['task_id']}"

    def state() -> str:
        return str(world.task(task["task_id"])["state"])

    assert f'href="{page}/pause"' in visitor.page(page)
    assert f'href="{page}/resume"' not in visitor.page(page)
    assert "Open no further rounds" in visitor.words(f"{page}/pause")
    assert state() == "running", "the question alone changes nothing"
    assert "The task is paused." in visitor.do(f"{page}/pause")
    assert state() == "paused"
    assert "The task goes on." in visitor.do(f"{page}/resume")
    assert "The task was cancelled." in visitor.do(f"{page}/cancel")
    assert state() == "cancelled"
    entries = world.operator("GET", "/v1/audit")[1]["items"]
    assert [each["action"] for each in entries][-3:] == ["task.pause", "task.resume", "task.cancel"]
    assert entries[-1]["actor"] == "admin:root"


def test_an_auditor_is_offered_no_action(world: World) -> None:
    task = world.create_task()
    auditor = Visitor(world, access_token(world, "auditor")[0])
    html = auditor.page(f"/dashboard/tasks/{task['task_id']}")
    assert "/pause" not in html
    assert "/tasks/new" not in auditor.page("/dashboard/tasks")


def test_somebody_of_another_population_sees_nothing_of_this_one(world: World) -> None:
    task = world.create_task()
    stranger = Visitor(world, access_token(world, "operator", populations=["elsewhere"])[0])
    for path in ("/dashboard/", "/dashboard/tasks"):
        assert task["task_id"] not in stranger.page(path)
        assert POPULATION not in stranger.page(path)
    page = f"/dashboard/tasks/{task['task_id']}"
    assert stranger.get(page).status_code == 404
    assert stranger.post(f"{page}/cancel").status_code == 404
    assert world.task(task["task_id"])["state"] == "running"


@pytest.mark.sampled(every=3)
def test_a_round_that_failed_lost_nobody_in_phases_that_it_did_not_come_to(world: World, visitor: Visitor) -> None:
    task = world.create_task(cohort=4)
    devices = world.add_devices(4)
    world.start_round(devices)
    devices[0].advertising()
    world.clock.now += 600
    world.settle()
    (failed,) = world.rounds(task["task_id"])
    assert failed["phase"] == "failed"
    words = visitor.words(f"/dashboard/rounds/{failed['round_id']}")
    assert "advertising 1 3 sharing 0 – complaining 0 –" in words
    for each in (words, visitor.words(f"/dashboard/tasks/{task['task_id']}")):
        assert "What to do: devices went away or trained too long" in each


@pytest.mark.sampled(every=3)
def test_what_devices_said_comes_with_what_to_do(world: World, visitor: Visitor) -> None:
    task = world.create_task(cohort=4)
    devices = world.add_devices(4)
    world.start_round(devices)
    for device in devices[:2]:
        assert device.call("POST", f"{device.round}/leave", LeaveRequest(reason="data"))[0] == 200
    world.settle()
    (failed,) = world.rounds(task["task_id"])
    assert "data 2 their examples do not fit the model" in visitor.words(f"/dashboard/tasks/{task['task_id']}")
    assert "data. What to do: their examples do not fit" in visitor.words(f"/dashboard/rounds/{failed['round_id']}")
