"""Logging in at the dashboard and out again: cookies, times, and tokens that end."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec
import pytest

from archipel.server.app import create_app
from archipel.server.callers import Identity
from archipel.server.dashboard.session_store import MOST_SESSIONS, Opening, SessionStore
from archipel.server.database.server_tables import PersonSession
from tests.support.visitors import HERE, Visitor, access_token
from tests.support.world import World


def is_in(visitor: Visitor) -> bool:
    answer = visitor.get("/dashboard/")
    assert answer.status_code in (200, 303)
    if answer.status_code == 303:
        assert answer.headers["Location"] == "/dashboard/login?next=%2Fdashboard%2F"
    return answer.status_code == 200


def test_the_front_page_leads_to_the_dashboard(world: World) -> None:
    visitor = Visitor(world)
    assert 'href="/dashboard/"' in visitor.page("/")
    assert not is_in(visitor)
    assert "Access token" in visitor.words("/dashboard/login")


@pytest.mark.sampled(every=3)
def test_a_token_opens_a_session_and_logging_out_ends_it(world: World) -> None:
    visitor = Visitor(world, world.operator_token)
    assert is_in(visitor)
    copied = Visitor(world)
    copied.client.set_cookie("archipel-local", cookie_of(visitor), domain="localhost")
    assert is_in(copied)
    assert visitor.post("/dashboard/logout").headers["Location"] == "/dashboard/login"
    assert not is_in(visitor)
    assert not is_in(copied), "the session itself has ended, and not only this browser's cookie"


def cookie_of(visitor: Visitor, name: str = "archipel-local") -> str:
    cookie = visitor.client.get_cookie(name, domain="localhost")
    assert cookie is not None
    return cookie.value


def test_the_database_has_hashes_of_cookies_alone(world: World) -> None:
    visitor = Visitor(world, world.operator_token)
    cookie = cookie_of(visitor)
    with world.services.database.read() as session:
        (row,) = session.query(PersonSession).all()
        assert row.session_hash == hashlib.sha256(cookie.encode()).digest()
    data = world.settings.path("archipel.db").read_bytes() + world.settings.path("archipel.db-wal").read_bytes()
    assert row.session_hash in data
    assert cookie.encode() not in data
    assert bytes.fromhex(world.settings.operator_token_sha256) not in data


@pytest.mark.parametrize("token", ["", "x", "apt_" + "x" * 43, "x" * 5000, "ü" * 43, "a b"])
@pytest.mark.sampled(every=6)
def test_a_wrong_token_opens_nothing(world: World, token: str) -> None:
    visitor = Visitor(world)
    answer = visitor.log_in(token)
    assert answer.status_code == 401
    assert "unknown, revoked or has expired" in answer.get_data(as_text=True)
    assert "Set-Cookie" not in answer.headers
    assert not is_in(visitor)


def test_a_device_has_no_place_here(world: World) -> None:
    (device,) = world.add_devices(1)
    assert Visitor(world).log_in(device.token).status_code == 401


def test_a_session_ends_with_its_token(world: World) -> None:
    token, token_id = access_token(world, "operator")
    visitor = Visitor(world, token)
    assert is_in(visitor)
    assert world.operator("POST", f"/v1/tokens/{token_id}/revoke")[0] == 200
    assert not is_in(visitor)
    token, _ = access_token(world, "operator", seconds=60)
    visitor = Visitor(world, token)
    world.clock.now += 59
    assert is_in(visitor)
    world.clock.now += 1
    assert not is_in(visitor)


def test_a_session_of_the_root_token_ends_when_that_is_replaced(world: World) -> None:
    visitor = Visitor(world, world.operator_token)
    cookie = cookie_of(visitor)
    replaced = msgspec.structs.replace(world.settings, operator_token_sha256=hashlib.sha256(b"new").hexdigest())
    app = create_app(replaced, clock=world.clock)
    try:
        client = app.test_client()
        client.set_cookie("archipel-local", cookie, domain="localhost")
        assert client.get("/dashboard/", base_url=HERE).status_code == 303
    finally:
        app.extensions["archipel"].database.dispose()
    assert is_in(visitor)


class TestTimes:
    @pytest.fixture
    def server_settings(self) -> Mapping[str, object]:
        return {"person_seconds": 1000.0, "person_idle_seconds": 300.0}

    def test_who_opens_no_page_is_out(self, world: World) -> None:
        visitor = Visitor(world, world.operator_token)
        world.clock.now += 299
        assert is_in(visitor)
        world.clock.now += 299
        assert is_in(visitor)
        world.clock.now += 300
        assert not is_in(visitor)

    def test_nobody_stays_for_longer_than_the_setting(self, world: World) -> None:
        visitor = Visitor(world, world.operator_token)
        for _ in range(4):
            world.clock.now += 249
            assert is_in(visitor)
        world.clock.now += 4
        assert not is_in(visitor)

    def test_the_coordinator_sweeps_what_has_ended(self, world: World) -> None:
        Visitor(world, world.operator_token)
        assert SessionStore(world.services).count() == 1
        world.clock.now += 1000
        world.coordinator._clean()
        assert SessionStore(world.services).count() == 0


def test_one_person_has_a_bounded_number_of_sessions(world: World) -> None:
    store = SessionStore(world.services)
    _, token_id = access_token(world, "operator")
    identity = Identity("operator", token_id)
    cookies = []
    for _ in range(MOST_SESSIONS + 2):
        world.clock.now += 1
        cookies.append(store.open(Opening.by_token(identity)))
    assert store.count() == MOST_SESSIONS
    assert [store.find(cookie) is None for cookie in cookies] == [True, True] + [False] * MOST_SESSIONS


@pytest.mark.sampled(every=3)
def test_logins_are_in_the_audit_log_and_refused_ones_are_counted(world: World) -> None:
    token, token_id = access_token(world, "auditor")
    visitor = Visitor(world, token)
    visitor.post("/dashboard/logout")
    visitor.log_in("apt_wrong")
    world.clock.now += 3600
    visitor.get("/dashboard/login")
    entries = world.operator("GET", "/v1/audit")[1]["items"]
    actions = [(each["actor"], each["action"]) for each in entries]
    assert (f"auditor:{token_id}", "dashboard.login") in actions
    assert (f"auditor:{token_id}", "dashboard.logout") in actions
    assert any(each["action"] == "access.refused" and each["detail"]["count"] == 1 for each in entries)
