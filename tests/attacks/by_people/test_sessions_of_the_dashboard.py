"""Attacks on who is logged in at the dashboard: other sites' pages, networks, planted cookies, guesses, old tokens."""

# ruff: noqa: F401, F811  (fixtures are imported)
from __future__ import annotations

from collections.abc import Mapping

import pytest
from werkzeug.test import TestResponse

from tests.support.fixtures.server import (
    bundle_file,
    bundle_maker,
    data_folder,
    empty_database,
    keys,
    server_settings,
    world,
)
from tests.support.visitors import CSRF, Visitor, access_token
from tests.support.world import World

HTTPS = "https://fl.example"
HTTP = "http://fl.example"


@pytest.fixture
def victim(world: World) -> Visitor:
    return Visitor(world, world.operator_token, base=HTTPS)


def state(world: World, task: Mapping[str, str]) -> str:
    return str(world.task(task["task_id"])["state"])


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"},
        {"Origin": "https://other.fl.example", "Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
    ],
)
@pytest.mark.sampled(every=8)
def test_another_sites_page_sends_no_form(world: World, victim: Visitor, headers: dict[str, str]) -> None:
    """Also where it has read the victim's CSRF token somewhere."""
    task = world.create_task()
    path = f"/dashboard/tasks/{task['task_id']}/cancel"
    csrf = victim.csrf
    assert victim.client.post(path, base_url=HTTPS, data={"csrf": csrf}, headers=headers).status_code == 403
    assert state(world, task) == "running"
    assert victim.send(path, {"csrf": csrf}).status_code == 303


@pytest.mark.parametrize("csrf", ["", "x", "of another session", "ü"])
@pytest.mark.sampled(every=6)
def test_a_form_needs_the_token_of_its_session(world: World, victim: Visitor, csrf: str) -> None:
    task = world.create_task()
    if csrf == "of another session":
        csrf = Visitor(world, world.operator_token, base=HTTPS).csrf
    for action in ("cancel", "pause"):
        answer = victim.send(f"/dashboard/tasks/{task['task_id']}/{action}", {"csrf": csrf})
        assert answer.status_code == 403
    assert victim.send("/dashboard/tasks/new", {"csrf": csrf, "sure": "yes"}).status_code == 403
    assert victim.send("/dashboard/logout", {"csrf": csrf}).status_code == 403
    assert state(world, task) == "running"
    assert victim.get("/dashboard/").status_code == 200


@pytest.mark.sampled(every=3)
def test_no_address_changes_anything_by_being_opened(world: World, victim: Visitor) -> None:
    """A picture of another site's page may have any address; the browser opens it."""
    task = world.create_task()
    path = f"/dashboard/tasks/{task['task_id']}"
    for action in ("cancel", "pause"):
        assert victim.get(f"{path}/{action}?sure=yes&csrf={victim.csrf}").status_code == 200
    assert victim.get("/dashboard/logout").status_code == 405
    assert state(world, task) == "running"


def test_nobody_is_logged_in_as_the_attacker(world: World) -> None:
    """A page of the attacker's sends its own token: what the victim then uploads would be the attacker's."""
    victim = Visitor(world, base=HTTPS)
    token = {"token": world.operator_token}
    for headers in ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
        answer = victim.client.post("/dashboard/login", base_url=HTTPS, data=token, headers=headers)
        assert answer.status_code == 403
        assert "Set-Cookie" not in answer.headers


def test_a_planted_cookie_is_not_the_victims_session(world: World) -> None:
    """Session fixation: the attacker knows a cookie, and the victim logs in with it in the browser."""
    attacker = Visitor(world, access_token(world, "auditor")[0], base=HTTPS)
    planted = attacker.client.get_cookie("__Host-archipel", domain="fl.example")
    assert planted is not None
    for value in (planted.value, "A" * 43):
        victim = Visitor(world, base=HTTPS)
        victim.client.set_cookie("__Host-archipel", value, domain="fl.example", secure=True)
        assert victim.log_in(world.operator_token).status_code == 303
        own = victim.client.get_cookie("__Host-archipel", domain="fl.example")
        assert own is not None
        assert own.value != value
        thief = Visitor(world, base=HTTPS)
        thief.client.set_cookie("__Host-archipel", value, domain="fl.example", secure=True)
        assert thief.get("/dashboard/").status_code == 303
        assert victim.get("/dashboard/audit").status_code == 200


def test_a_network_plants_no_cookie_of_the_name_for_local_pages(world: World) -> None:
    """Over plain HTTP anybody on the way can set a cookie for the host, but none with the prefix __Host-."""
    attacker = Visitor(world, access_token(world, "auditor")[0])
    local = attacker.client.get_cookie("archipel-local", domain="localhost")
    assert local is not None
    for base in (HTTPS, HTTP):
        victim = Visitor(world, base=base)
        victim.client.set_cookie("archipel-local", local.value, domain="fl.example")
        assert victim.get("/dashboard/").status_code == 303


def flags(answer: TestResponse) -> set[str]:
    (cookie,) = answer.headers.getlist("Set-Cookie")
    return {part.strip() for part in cookie.split(";")[1:]}


@pytest.mark.sampled(every=3)
def test_the_cookie_never_travels_in_the_clear_and_no_script_reads_it(world: World) -> None:
    answer = Visitor(world, base=HTTPS).log_in(world.operator_token)
    assert answer.headers["Set-Cookie"].startswith("__Host-archipel=")
    assert flags(answer) == {"Secure", "HttpOnly", "SameSite=Strict", "Path=/"}
    for local in ("http://localhost", "http://127.0.0.1:8470", "http://[::1]:8470"):
        answer = Visitor(world, base=local).log_in(world.operator_token)
        assert flags(answer) == {"HttpOnly", "SameSite=Strict", "Path=/"}


def test_no_token_is_taken_over_a_connection_in_the_clear(world: World) -> None:
    visitor = Visitor(world, base=HTTP)
    page = visitor.page("/dashboard/login")
    assert 'name="token"' not in page
    assert "not encrypted" in page
    answer = visitor.log_in(world.operator_token)
    assert answer.status_code == 403
    assert "Set-Cookie" not in answer.headers


def test_a_proxy_that_hides_the_browsers_address_makes_no_cookie_for_plain_http(world: World) -> None:
    """nginx sends its own address as Host unless it is told otherwise."""
    inside = "http://127.0.0.1:8470"
    sent = {"token": world.operator_token}
    for origin, status in ((HTTPS, 303), (HTTP, 403)):
        headers = {"Origin": origin, "Sec-Fetch-Site": "same-origin"}
        answer = Visitor(world).client.post("/dashboard/login", base_url=inside, data=sent, headers=headers)
        assert answer.status_code == status
        if status == 303:
            assert "Secure" in flags(answer)


@pytest.mark.parametrize(
    "wanted",
    [
        "https://evil.example/", "//evil.example/", "/\\evil.example", "/dashboard//evil.example",
        "javascript:alert(1)",
        "/dashboard/\r\nSet-Cookie: a=b", "/dashboard/../v1/server", "/dashboard/..//evil.example", "/dashboardevil",
        "/dashboard/@evil.example", "/dashboard/logout", "/demo/", "\t//evil.example", "/dashboard/%2f%2fevil.example",
    ],
)  # fmt: skip
@pytest.mark.sampled(every=6)
def test_the_way_after_the_login_leads_to_pages_of_the_dashboard_alone(world: World, wanted: str) -> None:
    answer = Visitor(world, base=HTTPS).log_in(world.operator_token, next=wanted)
    assert answer.status_code == 303
    assert answer.headers["Location"] == "/dashboard/"
    visitor = Visitor(world, world.operator_token, base=HTTPS)
    assert visitor.get("/dashboard/login?next=/dashboard/tasks%3Fstate=running").headers["Location"] == (
        "/dashboard/tasks?state=running"
    )


def test_a_session_ends_at_once_with_the_token_that_opened_it(world: World) -> None:
    token, token_id = access_token(world, "operator")
    thief = Visitor(world, token, base=HTTPS)
    task = world.create_task()
    csrf = thief.csrf
    assert world.operator("POST", f"/v1/tokens/{token_id}/revoke")[0] == 200
    assert thief.get("/dashboard/tasks").status_code == 303
    assert thief.send(f"/dashboard/tasks/{task['task_id']}/cancel", {"csrf": csrf}).status_code == 401
    assert state(world, task) == "running"


def test_pages_are_shown_in_no_frame_of_another_page(victim: Visitor) -> None:
    """Clickjacking: the victim would click on a button of ours below a picture of theirs."""
    for path in ("/dashboard/", "/dashboard/login", "/dashboard/tasks/new", "/dashboard/nowhere"):
        headers = victim.get(path).headers
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["Cross-Origin-Opener-Policy"] == "same-origin"


def test_the_csrf_token_is_in_no_answer_that_others_get(world: World, victim: Visitor) -> None:
    csrf = victim.csrf
    found = CSRF.search(Visitor(world, world.operator_token, base=HTTPS).page("/dashboard/"))
    assert found is not None
    assert found[1] != csrf
    assert csrf not in Visitor(world, base=HTTPS).page("/dashboard/login")


class TestGuessing:
    @pytest.fixture
    def server_settings(self) -> Mapping[str, object]:
        return {"anonymous_per_second": 1.0, "burst_seconds": 5.0}

    def test_guessing_tokens_and_cookies_is_limited_as_at_the_api(self, world: World) -> None:
        stranger = Visitor(world, base=HTTPS)
        tried = [stranger.log_in(f"apt_{number}").status_code for number in range(12)]
        assert set(tried[:5]) == {401}
        assert tried[-1] == 429
        assert stranger.log_in(world.operator_token).status_code == 429, "who guesses is not told when it was right"
        assert stranger.get("/dashboard/").status_code == 429, "guessing cookies counts, too"
