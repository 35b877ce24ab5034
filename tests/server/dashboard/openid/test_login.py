"""Logging in at the dashboard by a provider of identities: which role somebody has, and who gets none."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from archipel.errors import ServerError
from archipel.server.app import create_app
from archipel.server.dashboard.openid import subject_id
from archipel.server.settings import load_settings
from tests.support.openid_login import begin, come_back, openid, role_of
from tests.support.openid_provider import LyingProvider
from tests.support.visitors import HERE, Visitor
from tests.support.world import World


@pytest.mark.sampled(every=3)
def test_somebody_is_who_the_provider_says(world: World, provider: LyingProvider) -> None:
    visitor = Visitor(world)
    assert "Log in with 127.0.0.1" in visitor.words("/dashboard/login?next=/dashboard/tasks")
    asked = begin(Visitor(world))
    assert asked["redirect_uri"] == f"{HERE}/dashboard/login/openid/callback"
    assert (asked["code_challenge_method"], asked["response_type"]) == ("S256", "code")
    page = come_back(visitor, provider)
    # A page of this server leads on: browsers send no strict cookie along where another site has led.
    assert 'content="0; url=/dashboard/tasks"' in page
    assert role_of(visitor) == "operator"
    exchange = provider.asked[0]
    assert exchange["code"] == "c"
    assert len(exchange["code_verifier"]) >= 43
    audit = world.operator("GET", "/v1/audit?limit=100")[1]["items"]
    assert ("operator:openid:olga", "dashboard.login") in {(each["actor"], each["action"]) for each in audit}


@pytest.mark.parametrize(
    ("groups", "role"),
    [
        (["ml"], "operator"),
        ("ml", "operator"),
        (["everybody", "audit"], "auditor"),
        (["audit", "ml-admins", "ml"], "admin"),
        (["everybody"], None),
        ([], None),
        (None, None),
        ({"ml": True}, None),
        ([["ml"]], None),
        (["ML"], None),
    ],
)
@pytest.mark.sampled(every=8)
def test_roles_follow_from_the_claim(world: World, provider: LyingProvider, groups: Any, role: str | None) -> None:
    provider.claims = {"groups": groups}
    visitor = Visitor(world)
    page = come_back(visitor, provider)
    assert role_of(visitor) == role
    assert ("nothing in your claim &#39;groups&#39; has a role at this server" in page) == (role is None)


@pytest.mark.parametrize("named", [["pupils"], [], None, "pupils"])
@pytest.mark.sampled(every=6)
def test_populations_follow_from_a_claim(world: World, provider: LyingProvider, tmp_path: Path, named: Any) -> None:
    settings = load_settings(
        world.settings.folder, environment={}, smallest_answer=1,
        openid=openid(provider, tmp_path, populations_claim="sites"),
    )  # fmt: skip
    world.app = create_app(settings, clock=world.clock)
    provider.claims = {"sites": named}
    visitor = Visitor(world)
    come_back(visitor, provider)
    assert role_of(visitor) == ("operator of pupils" if named else None)


@pytest.mark.sampled(every=3)
def test_a_provider_that_is_away_is_told_and_tokens_still_open_the_door(world: World, provider: LyingProvider) -> None:
    provider.metadata = {"issuer": "https://another.example"}
    visitor = Visitor(world)
    page = visitor.get("/dashboard/login/openid")
    assert page.status_code == 401
    assert "openid.issuer is" in page.get_data(as_text=True)
    assert visitor.log_in(world.operator_token).status_code == 303


@pytest.mark.sampled(every=3)
def test_a_session_of_the_provider_ends_by_its_times(world: World, provider: LyingProvider) -> None:
    visitor = Visitor(world)
    come_back(visitor, provider)
    world.clock.now += world.settings.person_idle_seconds + 1
    assert role_of(visitor) is None


@pytest.mark.sampled(every=3)
def test_a_session_ends_with_the_settings_that_it_came_from(
    world: World, provider: LyingProvider, tmp_path: Path
) -> None:
    visitor = Visitor(world)
    come_back(visitor, provider)
    for changed in ({"operators": ("others",)}, {"operators": ("ml",)}, None):
        table = None if changed is None else openid(provider, tmp_path, **changed)
        settings = load_settings(world.settings.folder, environment={}, smallest_answer=1, openid=table)
        world.app = create_app(settings, clock=world.clock)
        again = Visitor(world)
        cookie = visitor.client.get_cookie("archipel-local", domain="localhost")
        assert cookie is not None
        again.client.set_cookie("archipel-local", cookie.value, domain="localhost")
        assert role_of(again) == ("operator" if changed == {"operators": ("ml",)} else None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"issuer": "http://login.example"}, "issuer: expected https://"),
        ({"issuer": "login.example"}, "issuer: expected such as"),
        ({"address": "https://a.example/x"}, "address: expected a URL without a path"),
        ({"scopes": ["profile"]}, "scopes: 'openid' is missing"),
        ({"operators": []}, "or nobody can log in"),
        ({"secret_file": "none.secret"}, "openid.secret_file:"),
        ({"isuer": "x"}, "did you mean"),
    ],
)
@pytest.mark.sampled(every=8)
def test_mistakes_in_the_settings(world: World, changes: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {
        "issuer": "https://login.example", "client_id": "archipel", "address": "https://a.example",
        "operators": ["ml"], **changes,
    }  # fmt: skip
    lines = [f"{name} = {value!r}".replace("'", '"') for name, value in given.items()]
    file = world.settings.path("server.toml")
    file.write_text(file.read_text() + "\n[openid]\n" + "\n".join(lines) + "\n")
    with pytest.raises(ServerError, match=re.escape(said)):
        create_app(load_settings(world.settings.folder, environment={}))


@pytest.mark.sampled(every=3)
def test_names_of_people(world: World) -> None:
    assert subject_id("https://a.example", "olga@example.org") == "openid:olga@example.org"
    odd = subject_id("https://a.example", "Ölga <script>")
    assert re.fullmatch("openid:[0-9a-f]{40}", odd)
    assert odd != subject_id("https://b.example", "Ölga <script>")
    assert len(odd) <= 48


@pytest.mark.sampled(every=3)
def test_the_table_can_be_given_by_environment_variables(world: World) -> None:
    given = world.settings.environment()
    assert given["ARCHIPEL_SERVER_OPENID_OPERATORS"] == '["ml"]'
    assert load_settings(world.settings.folder, environment=given) == world.settings


@pytest.mark.sampled(every=3)
def test_a_group_with_commas_is_one_in_the_server_s_processes_too(world: World) -> None:
    """As groups of a directory are named; the supervisor passes its settings on in variables."""
    group = "cn=ml,ou=hospital,dc=example"
    variables = world.settings.environment() | {"ARCHIPEL_SERVER_OPENID_ADMINS": json.dumps([group])}
    settings = load_settings(world.settings.folder, environment=variables)
    passed_on = load_settings(world.settings.folder, environment=settings.environment()).openid
    assert passed_on
    assert (passed_on.role_of([group]), passed_on.role_of(["ou=hospital"])) == ("admin", None)
