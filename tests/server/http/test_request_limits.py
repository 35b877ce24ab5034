"""How much one device, token or address may ask for."""

from __future__ import annotations

import gc
import gzip
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping

import msgspec
import pytest
from flask import Flask
from hypothesis import given
from hypothesis import strategies as st
from werkzeug.test import Client, TestResponse

from archipel.protocol import messages
from archipel.server.app import create_app
from archipel.server.http.request_limits import RequestLimits, Slots, TokenBuckets, address_source
from archipel.server.http.routes import Route
from archipel.server.settings import load_settings
from tests.support.devices import Device
from tests.support.world import World

FEW = {"requests_per_second": 1.0, "anonymous_per_second": 1.0, "burst_seconds": 3.0, "concurrent_requests": 2}


@pytest.fixture
def server_settings() -> Mapping[str, object]:
    return {}


class Passing:
    """The clock of the limits, which stands still until a test lets time pass."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> Passing:
    made = Passing()
    monkeypatch.setattr(RequestLimits.__init__, "__defaults__", (made,))  # instead of time.monotonic
    return made


@pytest.fixture
def strict(world: World, passing: Passing) -> Iterator[Flask]:
    """A web application with the same data and narrow limits."""
    app = create_app(msgspec.structs.replace(world.settings, **FEW), clock=world.clock)
    yield app
    app.extensions["archipel"].database.dispose()


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@given(
    st.lists(st.floats(0, 10), max_size=60),
    st.floats(0.1, 20),
    st.floats(1, 30),
)
def test_in_no_stretch_of_time_more_than_burst_and_rate_allow(steps: list[float], rate: float, burst: float) -> None:
    """The definition of a token bucket, counted over every stretch between two requests that were granted."""
    buckets, now, granted = TokenBuckets(rate, burst), 0.0, []
    for step in steps:
        now += step
        wait = buckets.take("x", now)
        if wait == 0.0:
            granted.append(now)
        else:
            assert wait * rate < 1e-6 or buckets.take("x", now + wait * 0.98) > 0
            now += wait * 1.001 + 1e-6
            assert buckets.take("x", now) == 0.0
            granted.append(now)
    for first, begin in enumerate(granted):
        for last in range(first, len(granted)):
            assert last - first + 1 <= burst + rate * (granted[last] - begin) + 1e-6


def test_sources_do_not_share_and_only_the_last_ones_are_remembered() -> None:
    buckets = TokenBuckets(1.0, 1.0, entries=3)
    assert [buckets.take(name, 0.0) for name in "abcab"] == [0.0, 0.0, 0.0, 1.0, 1.0]
    assert buckets.take("d", 0.0) == 0.0  # c goes: a and b came after it
    assert buckets.take("c", 0.0) == 0.0
    assert buckets.take("b", 0.0) == 1.0
    # A clock that goes back gives nothing away.
    assert buckets.take("b", -100.0) == 1.0


def test_slots_are_given_back_once() -> None:
    slots = Slots(2)
    first, second = slots.enter("a"), slots.enter("a")
    assert first is not None
    assert second is not None
    assert slots.enter("a") is None
    assert slots.enter("b") is not None
    first()
    first()
    third = slots.enter("a")
    assert third is not None
    assert slots.enter("a") is None


@pytest.mark.parametrize(
    ("address", "source"),
    [
        ("203.0.113.7", "address:203.0.113.7"),
        ("::ffff:203.0.113.7", "address:203.0.113.7"),
        ("2001:db8:1:2:3:4:5:6", "address:2001:db8:1:2::/64"),
        ("2001:db8:1:2::99", "address:2001:db8:1:2::/64"),
        ("::1", "address:::/64"),
        ("", "address:unknown"),
        (None, "address:unknown"),
        ("203.0.113.7:5555", "address:unknown"),
        ("<script>", "address:unknown"),
    ],
)
def test_addresses(address: str | None, source: str) -> None:
    assert address_source(address) == source


def statuses(ask: Callable[[], TestResponse], count: int) -> list[int]:
    found = []
    for _ in range(count):
        with ask() as response:
            found.append(response.status_code)
            if response.status_code == 429:
                problem = msgspec.json.decode(response.get_data(), type=messages.Problem)
                assert (problem.status, problem.detail) == (429, "too many requests; wait, then try again")
                assert response.headers["Retry-After"] == "1"
    return found


def test_each_device_and_each_token_for_itself(world: World, strict: Flask, passing: Passing) -> None:
    one, other = world.add_devices(2)
    client = strict.test_client()
    for device in (one, other):
        ask = lambda device=device: client.post("/v1/check-ins", data=b"{}", headers=bearer(device.token))  # noqa: E731
        assert statuses(ask, 5) == [200, 200, 200, 429, 429]
    assert statuses(lambda: client.get("/v1/tasks", headers=bearer(world.operator_token)), 4) == [200, 200, 200, 429]
    passing.now += 1.1
    assert statuses(lambda: client.post("/v1/check-ins", data=b"{}", headers=bearer(one.token)), 2) == [200, 429]


def test_addresses_that_have_proved_nothing(world: World, strict: Flask) -> None:
    client = strict.test_client()

    def challenge(address: str, **headers: str) -> TestResponse:
        return client.post("/v1/challenges", data=b"{}", headers=headers, environ_overrides={"REMOTE_ADDR": address})

    assert statuses(lambda: challenge("203.0.113.7"), 4) == [400, 400, 400, 429]
    assert statuses(lambda: challenge("203.0.113.8"), 1) == [400]
    # Whoever asks for another address by a header is not believed.
    assert statuses(lambda: challenge("203.0.113.7", **{"X-Forwarded-For": "198.51.100.1"}), 1) == [429]
    # Without a token, and with wrong ones, on routes that need one.
    where = {"REMOTE_ADDR": "203.0.113.9"}
    for headers, status in (({}, 401), (bearer("wrong"), 401), (bearer("apt_wrong"), 401), (bearer("wrong"), 429)):
        assert statuses(lambda h=headers: client.get("/v1/tasks", headers=h, environ_overrides=where), 1) == [status]
    # Who has proved who it is does not suffer from its neighbours.
    right = bearer(world.operator_token)
    assert statuses(lambda: client.get("/v1/tasks", headers=right, environ_overrides=where), 1) == [200]


@pytest.mark.sampled(every=3)
@pytest.mark.usefixtures("passing")
def test_behind_proxies_the_address_is_the_one_that_they_saw(world: World) -> None:
    app = create_app(msgspec.structs.replace(world.settings, **FEW, trusted_proxies=2), clock=world.clock)
    client = app.test_client()

    def ask(forwarded: str) -> TestResponse:
        return client.post("/v1/challenges", data=b"{}", headers={"X-Forwarded-For": forwarded})

    # The client sent the first address itself, the outer proxy added the second, the inner one the third.
    assert statuses(lambda: ask("192.0.2.1, 203.0.113.7, 10.0.0.1"), 4) == [400, 400, 400, 429]
    assert statuses(lambda: ask("192.0.2.99, 203.0.113.7, 10.0.0.1"), 1) == [429]
    assert statuses(lambda: ask("203.0.113.8, 10.0.0.1"), 1) == [400]
    app.extensions["archipel"].database.dispose()


class Waiting:
    """An upload whose body comes only when it is let."""

    def __init__(self, app: Flask, device: Device) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.status = 0
        self._app, self._device = app, device
        self._thread = threading.Thread(target=self._send)
        self._thread.start()
        assert self.begun.wait(10)

    def read(self, size: int = -1) -> bytes:
        self.begun.set()
        assert self.go.wait(10)
        return b""

    def _send(self) -> None:
        size = 9 * ((self._device.plan.modulus_bits + 7) // 8)
        headers = {**bearer(self._device.token), "Digest-SHA256": "0" * 64}
        environ = {"CONTENT_LENGTH": str(size), "wsgi.input": self, "wsgi.input_terminated": True}
        client, path = Client(self._app), f"{self._device.round}/update"
        with client.put(path, headers=headers, environ_overrides=environ) as response:
            self.status = response.status_code

    def finish(self) -> None:
        self.go.set()
        self._thread.join()


@pytest.mark.sampled(every=3)
def test_at_the_same_time(world: World, strict: Flask, passing: Passing) -> None:
    world.create_task(cohort=3)
    devices = world.add_devices(3)
    world.start_round(devices)
    world.run_to("masking", devices)
    client = strict.test_client()
    uploads = [Waiting(strict, devices[0]) for _ in range(2)]
    with client.get(devices[0].round, headers=bearer(devices[0].token)) as response:
        assert response.status_code == 429
        assert response.get_json()["detail"].startswith("too many requests at the same time")
    with client.get(devices[1].round, headers=bearer(devices[1].token)) as response:
        assert response.status_code == 200
    for upload in uploads:
        upload.finish()
    assert [upload.status for upload in uploads] == [400, 400]
    passing.now += 1.1
    with client.get(devices[0].round, headers=bearer(devices[0].token)) as response:
        assert response.status_code == 200


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("extra", [{}, {"Range": "bytes=1-"}])
def test_a_download_counts_until_it_has_been_sent(
    world: World, strict: Flask, passing: Passing, extra: dict[str, str]
) -> None:
    digest = world.publish()
    client = Client(strict)
    headers = bearer(world.operator_token)
    downloads = [client.get(f"/v1/bundles/{digest}", headers={**headers, **extra}) for _ in range(2)]
    assert {response.status_code for response in downloads} == {206 if extra else 200}
    gc.collect()
    with client.get("/v1/tasks", headers=headers) as response:
        assert response.get_json()["detail"].startswith("too many requests at the same time")
    for download in downloads:
        download.close()
    del download
    downloads.clear()
    passing.now += 1.1
    with client.get("/v1/tasks", headers=headers) as response:
        assert response.status_code == 200


def test_requests_that_fail_are_over(world: World, strict: Flask, passing: Passing) -> None:
    client = Client(strict)
    headers = bearer(world.operator_token)
    for _ in range(3):
        with client.get(f"/v1/tasks/{'0' * 32}", headers=headers) as response:
            assert response.status_code == 404
    passing.now += 1.1
    with client.get("/v1/tasks", headers=headers) as response:
        assert response.status_code == 200


def test_a_compressed_body_is_refused(world: World) -> None:
    (device,) = world.add_devices(1)
    packed = gzip.compress(b"{}")
    for coding, status in (("gzip", 415), ("br", 415), ("GZIP, identity", 415), ("identity", 400), ("Identity", 400)):
        found, answer = device.call("POST", "/v1/check-ins", packed, {"Content-Encoding": coding})
        assert found == answer["status"] == status
    headers = {"Content-Encoding": "gzip", "Digest-SHA256": hashlib.sha256(packed).hexdigest()}
    assert device.call("PUT", f"/v1/rounds/{'0' * 32}/update", packed, headers)[0] == 415


def test_the_defaults_leave_room_for_a_device_that_polls_twenty_times_a_second(world: World) -> None:
    settings = load_settings(world.settings.folder, environment={})
    buckets = TokenBuckets(settings.requests_per_second, settings.requests_per_second * settings.burst_seconds)
    assert not any(buckets.take("device", number / 20) for number in range(20 * 60))
    assert settings.concurrent_requests < settings.threads


def test_routes_are_all_behind_the_limits(world: World, strict: Flask) -> None:
    """No view was registered past them."""
    from archipel.server.http.api import ROUTES
    from tests.server.http.test_permissions import concrete

    table: list[Route] = [route for routes in ROUTES.values() for route in routes]
    client = Client(strict)
    for _ in range(4):
        # Files have a bucket of their own.
        for path in ("/v1/health", "/v1/openapi.json"):
            client.get(path, environ_overrides={"REMOTE_ADDR": "203.0.113.7"}).close()
    for route in table:
        where = {"REMOTE_ADDR": "203.0.113.7"}
        with client.open(concrete(route.path), method=route.method, environ_overrides=where) as response:
            assert response.status_code in (401, 429), route
            if "anyone" in route.roles:
                assert response.status_code == 429, route
