"""Pages that follow a task's rounds: the stream of events, who may read it, how many, and how long."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import select
from sqlalchemy.exc import OperationalError

from archipel.errors import ApiError
from archipel.server.callers import Identity
from archipel.server.dashboard.live import LIVE, LivePages, Shown, Viewer, hub
from archipel.server.dashboard.live.hub import encode_event
from archipel.server.database.engine import Database
from archipel.server.database.tables import Task
from tests.server.rounds.test_leaving import leave
from tests.server.rounds.test_plain_rounds import update
from tests.support.event_stream import EventStream
from tests.support.visitors import HERE, Visitor, access_token
from tests.support.world import World

SOON = 2.0
"""Seconds within which a page shows what has happened."""


@pytest.fixture
def visitor(world: World) -> Visitor:
    return Visitor(world, world.operator_token)


@contextmanager
def following(visitor: Visitor, task: str, after: str = "", **headers: str) -> Iterator[EventStream]:
    asked = f"?after={after}" if after else ""
    path = f"/dashboard/tasks/{task}/events{asked}"
    response = visitor.client.get(path, base_url=HERE, headers=headers, buffered=False)
    assert (response.status_code, response.mimetype) == (200, "text/event-stream"), response.get_data(as_text=True)
    stream = EventStream(response.iter_encoded())
    try:
        yield stream
    finally:
        live: LivePages = visitor.world.app.extensions[LIVE]
        with live._lock:
            # As when the browser closes the connection.
            for topic in live._topics.values():
                for each in topic.streams:
                    each.gone = True
                topic.news.notify_all()
        stream.join()


def words(html: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


@pytest.mark.sampled(every=6)
def test_a_page_shows_each_phase_soon_after_it_began(world: World, visitor: Visitor) -> None:
    task = world.create_task(cohort=3, min_cohort=3)["task_id"]
    devices = world.add_devices(3)
    with following(visitor, task) as stream:
        assert "No round was opened yet." in words(stream.next().data)  # type: ignore[union-attr]
        world.start_round(devices)
        stream.until("advertising", SOON)
        devices[0].advertising()
        event = stream.until("1 of 3 advertised", SOON)
        for device in devices[1:]:
            device.advertising()
        world.settle()
        for phase in ("sharing", "complaining", "masking", "confirming", "unmasking"):
            stream.until(phase, SOON)
            for device in devices:
                device.answer(phase)
            world.settle()
        last = stream.until("committed", SOON)
        assert "live-state" in last.data
        assert "completed" in words(last.data)
        assert world.task(task)["model"][:12] in last.data
        with pytest.raises(queue.Empty):
            stream.next(SOON)  # a task that has ended changes no more
    assert event.name == "rounds"


@pytest.mark.sampled(every=3)
def test_curves_and_buttons_follow_what_happens(world: World, visitor: Visitor) -> None:
    task = world.create_task(rounds=2, privacy="plain", threshold=None, cohort=3)["task_id"]
    devices = world.add_devices(3)
    analyst = Visitor(world, access_token(world, "auditor")[0])
    with following(visitor, task) as stream, following(analyst, task) as other:
        first = stream.next()
        assert first is not None
        assert 'id="live-curves"' in first.data
        assert "length of the step" not in first.data
        assert visitor.post(f"/dashboard/tasks/{task}/pause").status_code == 303
        event = stream.until(f'href="/dashboard/tasks/{task}/resume"', SOON)
        assert f"{task}/pause" not in event.data
        assert 'id="live-curves"' not in event.data, "nothing new is in the curves"
        assert "/resume" not in other.until("paused", SOON).data, "an auditor has no buttons"
        assert visitor.post(f"/dashboard/tasks/{task}/resume").status_code == 303
        world.start_round(devices)
        for index, device in enumerate(devices):
            device.updating(**update(index))
        world.settle()
        event = stream.until("length of the step", SOON)
        assert "length of the step in round 1: " in event.data
        assert "length of the step in round 1: " in visitor.page(f"/dashboard/tasks/{task}")
        # With what it has, a page that comes back is sent the curves alone that it lacks.
        rounds, results = event.id.split(".")
    with following(visitor, task, after=f"{'0' * 16}.{results}") as stream:
        again = stream.next()
        assert again is not None
        assert (again.id, 'id="live-curves"' in again.data) == (event.id, False)
    with following(visitor, task, after=f"{rounds}.{'0' * 16}") as stream:
        again = stream.next()
        assert again is not None
        assert ('id="live-cards"' in again.data, 'id="live-curves"' in again.data) == (False, True)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("server_settings", [{"smallest_answer": 3}])
@pytest.mark.parametrize("eligibility", ["", "ram >= 1"])
def test_who_failed_is_a_link_to_the_device_unless_the_name_holds_for_one_round(
    world: World, visitor: Visitor, eligibility: str
) -> None:
    task = world.create_task(
        privacy="plain", threshold=None, cohort=3, min_cohort=3, eligibility=eligibility
    )["task_id"]  # fmt: skip
    devices = world.add_devices(3)
    for device in devices:
        device.attributes = {"ram": 2.0}
        assert device.check_in() is None
    world.settle()
    assert all(device.join() for device in devices)
    assert leave(devices[0])[0] == 200
    page = visitor.page(f"/dashboard/tasks/{task}")
    table = page[page.index('id="live-missing"') : page.index('id="live-table"')]
    links = re.findall(r'href="(/dashboard/devices/[^"]+)"', table)
    assert "it left the round" in table
    round_id = world.operator("GET", f"/v1/tasks/{task}/rounds")[1]["items"][0]["round_id"]
    of_round = re.findall(r'href="(/dashboard/devices/[^"]+)"', visitor.page(f"/dashboard/rounds/{round_id}"))
    every = {f"/dashboard/devices/{device.id}" for device in devices}
    assert set(of_round) == (set() if eligibility else every)
    assert f"/dashboard/devices/{devices[0].id}" in links or eligibility
    assert set(links) <= set(of_round)
    for link in of_round:
        assert link.rpartition("/")[2] in visitor.page(link)


@pytest.mark.sampled(every=4)
def test_what_the_result_can_be_used_for_is_told_when_the_task_has_ended(world: World, visitor: Visitor) -> None:
    task = world.create_task(rounds=1, privacy="plain", threshold=None, cohort=3)["task_id"]
    devices = world.add_devices(3)
    auditor = Visitor(world, access_token(world, "auditor")[0])
    with following(visitor, task) as stream, following(auditor, task) as other:
        first = stream.next()
        assert first is not None
        assert "Created" in words(first.data)
        assert "can be a version" not in first.data
        world.start_round(devices)
        for index, device in enumerate(devices):
            device.updating(**update(index))
        world.settle()
        told = words(stream.until("make a model", SOON).data)
        assert "Ended" in told
        assert f"newest weights {world.task(task)['model'][:16]}" in told
        assert "make a model" not in other.until("Ended", SOON).data, "an auditor makes none"


@pytest.mark.sampled(every=4)
def test_a_page_that_shows_it_already_is_sent_nothing(world: World, visitor: Visitor) -> None:
    task = world.create_task(cohort=3, min_cohort=3)["task_id"]
    shown = re.search(r'data-version="([0-9a-f]{16}[.][0-9a-f]{16})"', visitor.page(f"/dashboard/tasks/{task}"))
    assert shown is not None
    with following(visitor, task, after=shown[1]) as stream:
        with pytest.raises(queue.Empty):
            stream.next(1.0)
        world.start_round(world.add_devices(3))
        event = stream.until("advertising", SOON)
    # Time alone is no news, and after a restart of the server a browser says what it has.
    world.clock.now += 5
    with following(visitor, task, **{"Last-Event-ID": event.id}) as stream, pytest.raises(queue.Empty):
        stream.next(1.0)
    with following(visitor, task, after="nonsense") as stream:
        assert stream.next().id == event.id  # type: ignore[union-attr]


@pytest.mark.sampled(every=3)
def test_a_stream_ends_with_its_session(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "RECHECK_SECONDS", 0.1)
    task = world.create_task()["task_id"]
    token, token_id = access_token(world, "auditor")
    with following(Visitor(world, token), task) as stream:
        assert stream.next() is not None
        assert world.operator("POST", f"/v1/tokens/{token_id}/revoke")[0] == 200
        assert stream.ended(SOON) == ["over"]
    out = Visitor(world, world.operator_token)
    with following(out, task) as stream:
        assert out.post("/dashboard/logout").status_code == 303
        assert stream.ended(SOON)[-1] == "over"


@pytest.mark.sampled(every=3)
def test_no_event_goes_to_who_may_look_no_more(world: World) -> None:
    """The check of every few seconds has not come yet."""
    task = world.create_task(cohort=3, min_cohort=3)["task_id"]
    token, token_id = access_token(world, "auditor")
    with following(Visitor(world, token), task) as stream:
        first = stream.next()
        world.operator("POST", f"/v1/tokens/{token_id}/revoke")
        world.start_round(world.add_devices(3))
        assert first is not None
        assert stream.ended(SOON) == ["over"]


@pytest.mark.sampled(every=3)
def test_the_places_of_one_person_and_of_all(world: World, visitor: Visitor) -> None:
    task = world.create_task()["task_id"]
    live: LivePages = world.app.extensions[LIVE]
    responses = [
        visitor.client.get(f"/dashboard/tasks/{task}/events", base_url=HERE, buffered=False)
        for _ in range(hub.OF_ONE_PERSON)
    ]
    assert {each.status_code for each in responses} == {200}
    # They take none of the places of requests.
    assert visitor.get(f"/dashboard/tasks/{task}").status_code == 200
    refused = visitor.get(f"/dashboard/tasks/{task}/events")
    assert refused.status_code == 429
    assert "kept up to date already" in refused.get_data(as_text=True)
    token, _ = access_token(world, "auditor")
    with following(Visitor(world, token), task):
        assert len(live) == hub.OF_ONE_PERSON + 1
    for each in responses:
        each.close()
    assert len(live) == 0
    with following(visitor, task):
        pass


@pytest.mark.parametrize("server_settings", [{"live_pages": 0}])
def test_a_server_that_keeps_none_up_to_date(world: World, visitor: Visitor) -> None:
    task = world.create_task()["task_id"]
    assert visitor.get(f"/dashboard/tasks/{task}/events").status_code == 503
    assert "No round was opened yet." in visitor.words(f"/dashboard/tasks/{task}")


def make_hub(stamp: dict[str, object], **parts: object) -> tuple[LivePages, Counter[str]]:
    """A hub of pages that show the stamps of their tasks, and how often each was made."""
    made: Counter[str] = Counter()

    def make(task_id: str, viewer: Viewer) -> Shown:
        made[task_id] += 1
        return Shown(((f"{task_id} {stamp[task_id]}", f"page {stamp[task_id]}"),), lively=False)

    whole: dict[str, object] = {
        "most": 100, "make": make, "alive": lambda digests: set(digests), "stamps": lambda tasks: dict(stamp), **parts
    }  # fmt: skip
    return LivePages(**whole), made  # type: ignore[arg-type]


def someone(number: int = 0) -> Viewer:
    return Viewer(Identity("auditor", str(number)), bytes([number]), "other")


@pytest.mark.sampled(every=4)
def test_what_many_watch_is_made_once_and_wakes_these_alone() -> None:
    stamp: dict[str, object] = {"a": 0, "b": 0}
    live, made = make_hub(stamp)
    streams = [EventStream(live.open("a", someone(i), seen="", descriptor=None)) for i in range(20)]
    other = EventStream(live.open("b", someone(50), seen="", descriptor=None))
    for each in (*streams, other):
        assert each.next() is not None
    time.sleep(3 * hub.LOOK_SECONDS)
    before = dict(made)
    assert sum(before.values()) <= 4
    stamp["a"] = 1
    assert {each.until("page").data for each in streams} == {"page 1"}
    assert (made["a"], made["b"]) == (before["a"] + 1, before["b"])
    with pytest.raises(queue.Empty):
        other.next(2 * hub.LOOK_SECONDS)
    live.close()
    assert [each.ended() for each in (*streams, other)] == [[]] * 21


@pytest.mark.sampled(every=3)
def test_a_reader_who_cannot_be_checked_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "UNCHECKED_SECONDS", 1.0)
    monkeypatch.setattr(hub, "KEEP_ALIVE_SECONDS", 0.2)

    def stamps(tasks: Collection[str]) -> dict[str, object]:
        raise OperationalError("", {}, Exception("the database is away"))

    live, _ = make_hub({"a": 0}, stamps=stamps)
    stream = EventStream(live.open("a", someone(), seen="", descriptor=None))
    assert stream.ended(4.0) == ["rounds"]
    assert stream.comments > 1
    assert len(live) == 0
    live.close()


def test_a_stream_has_an_end_and_a_server_that_stops_opens_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "LONGEST_SECONDS", 0.3)
    monkeypatch.setattr(hub, "KEEP_ALIVE_SECONDS", 0.1)
    live, _ = make_hub({"a": 0})
    assert EventStream(live.open("a", someone(), seen="", descriptor=None)).ended() == ["rounds"]
    live.close()
    with pytest.raises(ApiError, match="keeps no page up to date now"):
        live.open("a", someone(), seen="", descriptor=None)


def test_events_have_no_line_that_would_end_them() -> None:
    assert encode_event("rounds", "1", "a\n\nb\rc") == b"event: rounds\nid: 1\ndata: a\ndata: \ndata: b\ndata: c\n\n"


def test_threads_that_look_one_after_the_other_share_a_connection(world: World) -> None:
    database: Database = world.services.database
    first = database._looking
    world.create_task()

    def look() -> None:
        assert len(database.look_all(select(Task.task_id))) == 1

    for _ in range(20):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert len(first._idle) == 1  # type: ignore[union-attr]
