"""Somebody watches a task's page who may not, for longer than they may, or so often that devices find no place.

Who: people with a token of another population, a device with its session, somebody whose token was revoked while a page
was open, another site's page in an operator's browser, and somebody with a token who opens as many streams as they can.
What they want: to follow the rounds of a task that is none of theirs, or to keep devices from being answered. What
stops them: a stream is opened after the same checks as a page, each event is sent after another check of the session,
and streams have places and threads of their own.
"""

# ruff: noqa: F811 (fixtures are imported and then arguments)
from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack

import pytest
import urllib3

from archipel.operator import OperatorClient, TaskRequest
from archipel.protocol.operator.access import TokenRequest
from archipel.server.dashboard.live import LIVE, hub
from tests.support.devices import Device
from tests.support.event_stream import EventStream
from tests.support.fixtures.server import (  # noqa: F401  (fixtures)
    bundle_file,
    bundle_maker,
    data_folder,
    empty_database,
    keys,
    world,
)
from tests.support.serving import Server
from tests.support.visitors import HERE, Visitor, access_token
from tests.support.world import DataFolder, World

ORIGIN = "https://other.example"


@pytest.fixture
def server_settings() -> Mapping[str, object]:
    return {"allowed_origins": (ORIGIN,)}


def open_events(visitor: Visitor, task: str, **headers: str) -> tuple[int, str]:
    answer = visitor.get(f"/dashboard/tasks/{task}/events", **headers)
    return answer.status_code, answer.get_data(as_text=True)


@pytest.mark.sampled(every=3)
def test_a_token_of_another_population_and_a_device_watch_nothing(world: World) -> None:
    task = world.create_task(name="hush-2718")["task_id"]
    for role in ("operator", "analyst", "auditor"):
        token, _ = access_token(world, role, populations=["teachers"])
        status, said = open_events(Visitor(world, token), task)
        assert status == 404
        assert "hush-2718" not in said
        authorization = {"Authorization": f"Bearer {token}"}
        assert world.operator("GET", f"/v1/tasks/{task}/progress", headers=authorization)[0] == 404
    [device] = world.add_devices(1)
    stranger = Visitor(world)
    for headers in ({}, {"Authorization": f"Bearer {device.token}"}, {"Cookie": f"archipel-local={device.token}"}):
        # The way to the login, and nothing else.
        status, said = open_events(stranger, task, **headers)
        assert status == 303
        assert "hush-2718" not in said
    assert device.call("GET", f"/v1/tasks/{task}/progress")[0] == 403
    assert device.call("GET", f"/dashboard/tasks/{task}/events")[0] == 303
    assert len(world.app.extensions[LIVE]) == 0


def test_a_page_of_another_site_reads_no_stream(world: World) -> None:
    """Not even one whose pages may be devices."""
    task = world.create_task()["task_id"]
    visitor = Visitor(world, world.operator_token)
    path = f"/dashboard/tasks/{task}/events"
    answer = visitor.client.get(path, base_url=HERE, headers={"Origin": ORIGIN}, buffered=False)
    assert not [name for name, _ in answer.headers if name.startswith("Access-Control")]
    assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
    answer.close()
    # Browsers send no cookie with it at all.
    cookie = visitor.client.get_cookie("archipel-local")
    assert cookie is not None
    assert (cookie.same_site, cookie.http_only) == ("Strict", True)


@pytest.mark.sampled(every=3)
def test_a_stream_does_not_outlive_its_token(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Revoked, expired, or for somebody who is logged out; also where events come all the time."""
    monkeypatch.setattr(hub, "RECHECK_SECONDS", 0.2)
    task = world.create_task(cohort=3, min_cohort=3)["task_id"]

    def watch(token: str) -> EventStream:
        visitor = Visitor(world, token)
        return EventStream(
            visitor.client.get(f"/dashboard/tasks/{task}/events", base_url=HERE, buffered=False).iter_encoded()
        )

    revoked, token_id = access_token(world, "operator")
    expiring, _ = access_token(world, "auditor", seconds=30)
    staying, _ = access_token(world, "auditor")
    streams = [watch(token) for token in (revoked, expiring, staying)]
    for each in streams:
        assert each.next() is not None
    world.operator("POST", f"/v1/tokens/{token_id}/revoke")
    world.clock.now += 31
    devices = world.add_devices(3)
    world.start_round(devices)
    for device in devices:
        device.advertising()
    world.settle()
    assert streams[0].ended(3.0) == ["over"]
    assert streams[1].ended(3.0) == ["over"]
    assert "sharing" in streams[2].until("sharing").data


@pytest.fixture
def server(data_folder: DataFolder) -> Iterator[Server]:
    made = Server(data_folder[0])
    made.start(threads="3", concurrent_requests="2", held_check_ins="2", live_pages="40")
    yield made
    made.stop()


@pytest.mark.sampled(every=6)
def test_many_streams_take_nothing_from_devices(
    server: Server,
    data_folder: DataFolder,
    bundle_file: object,
) -> None:
    """A hundred of each of three tokens, at a server of three threads."""
    _, token, keys = data_folder
    pool = urllib3.PoolManager(maxsize=400, block=False, retries=False)

    def transport(method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        response = pool.request(method, server.url + path, body=body, headers=headers)
        return response.status, response.data

    with OperatorClient(server.url, token) as operator, ExitStack() as stack:
        key = operator.server.info().server_key
        device = Device(transport, keys, key, not_after=2e9).enrol().open_session()
        digest = operator.bundles.upload(bundle_file).digest  # type: ignore[arg-type]
        request = TaskRequest(name="t", population="pupils", bundle=digest, rounds=1, min_cohort=3, cohort=5)
        task = operator.tasks.create(request).task_id
        statuses: list[int] = []
        for _ in range(3):
            own = operator.tokens.create(TokenRequest(name="test", role="auditor")).token
            form, origin = {"token": own}, {"Origin": server.url}
            answer = pool.request(
                "POST", f"{server.url}/dashboard/login", fields=form, encode_multipart=False, headers=origin,
                redirect=False,
            )  # fmt: skip
            cookie = {"Cookie": answer.headers["Set-Cookie"].split(";")[0]}
            for _ in range(100):
                opened = pool.request(
                    "GET", f"{server.url}/dashboard/tasks/{task}/events", headers=cookie, preload_content=False
                )
                stack.callback(opened.close)
                statuses.append(opened.status)
        # Sixteen of each, and of all together as many as there are places for.
        assert statuses.count(200) == 40
        assert set(statuses) == {200, 429, 503}
        took = []
        for _ in range(20):
            began = time.monotonic()
            device.check_in()
            took.append(time.monotonic() - began)
        assert max(took) < 2.0
        # The operator's own page opens too.
        assert operator.tasks.progress(task).state == "running"
