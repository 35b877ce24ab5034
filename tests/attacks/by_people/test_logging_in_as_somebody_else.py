"""Nobody gets into the dashboard as somebody that the provider of identities has not named, or for whom it is not."""

# ruff: noqa: F811  (fixtures are imported)
from __future__ import annotations

from typing import Any

import pytest

from tests.support.fixtures.openid import provider, server_settings  # noqa: F401  (fixtures)
from tests.support.fixtures.server import bundle_file, bundle_maker, data_folder, empty_database, keys, world  # noqa: F401
from tests.support.openid_login import begin, come_back, role_of
from tests.support.openid_provider import LyingProvider
from tests.support.visitors import Visitor
from tests.support.world import World


@pytest.mark.parametrize("signed_by", ["another", "nobody", "the public key"])
@pytest.mark.sampled(every=4)
def test_a_token_that_the_provider_has_not_signed(world: World, provider: LyingProvider, signed_by: str) -> None:
    visitor = Visitor(world)
    provider.signed_by = signed_by
    assert "cannot be believed" in come_back(visitor, provider)
    assert role_of(visitor) is None
    provider.signed_by = "own"
    come_back(visitor, provider)
    assert role_of(visitor) == "operator"


@pytest.mark.parametrize(
    "claims",
    [
        {"iss": "https://another.example"},
        {"aud": "another-client"},
        {"aud": ["archipel", "another-client"]},
        {"nonce": "of another login"},
        {"nonce": None},
        {"exp": 1},
        {"exp": None},
        {"sub": None},
        {"sub": ""},
        {"sub": 7},
        {"azp": "another-client"},
    ],
    ids=str,
)
@pytest.mark.sampled(every=8)
def test_a_token_for_somebody_or_something_else(world: World, provider: LyingProvider, claims: dict[str, Any]) -> None:
    provider.claims = claims
    visitor = Visitor(world)
    come_back(visitor, provider)
    assert role_of(visitor) is None


@pytest.mark.sampled(every=3)
def test_an_answer_that_this_browser_has_not_asked_for(world: World, provider: LyingProvider) -> None:
    """A page of an attacker leads somebody to the callback with the attacker's own code, to log them in as the
    attacker."""
    attacker, victim = Visitor(world), Visitor(world)
    provider.clock = world.clock
    asked = begin(attacker)
    provider.nonce = asked["nonce"]
    query = {"code": "c", "state": asked["state"]}
    for begun in (False, True):
        if begun:
            begin(victim)
        answer = victim.client.get("/dashboard/login/openid/callback", base_url=victim.base, query_string=query)
        assert answer.status_code == 401
        assert role_of(victim) is None
    assert provider.asked == [], "nothing was asked with a code of somebody else"


@pytest.mark.sampled(every=3)
def test_a_cookie_of_ones_own_making(world: World, provider: LyingProvider) -> None:
    visitor = Visitor(world)
    begin(visitor)
    cookie = visitor.client.get_cookie("archipel-local-login", domain="localhost")
    assert cookie is not None
    for changed in (cookie.value[:-8] + "AAAAAAAA", cookie.value[44:], "", "%", "A" * 4000):
        visitor.client.set_cookie("archipel-local-login", changed, domain="localhost")
        answer = visitor.get("/dashboard/login/openid/callback?code=c&state=s")
        assert "his browser has begun no login" in answer.get_data(as_text=True)


@pytest.mark.sampled(every=3)
def test_an_answer_comes_too_late_or_a_second_time(world: World, provider: LyingProvider) -> None:
    provider.clock = world.clock
    visitor = Visitor(world)
    asked = begin(visitor)
    provider.nonce = asked["nonce"]
    kept = visitor.client.get_cookie("archipel-local-login", domain="localhost")
    assert kept is not None
    path = f"/dashboard/login/openid/callback?code=c&state={asked['state']}"
    world.clock.now += 601
    assert "took too long" in visitor.get(path).get_data(as_text=True)
    assert visitor.client.get_cookie("archipel-local-login", domain="localhost") is None
    # The cookie is gone after one answer, so another one with the same code is of no use in this browser.
    assert "has begun no login" in visitor.get(path).get_data(as_text=True)


@pytest.mark.parametrize("wanted", ["https://evil.example/", "//evil.example", "/dashboard/../v1/tokens", "/other"])
@pytest.mark.sampled(every=6)
def test_the_way_back_leads_to_the_dashboard_alone(world: World, provider: LyingProvider, wanted: str) -> None:
    provider.clock = world.clock
    visitor = Visitor(world)
    asked = begin(visitor, wanted)
    provider.nonce = asked["nonce"]
    page = visitor.get(f"/dashboard/login/openid/callback?code=c&state={asked['state']}").get_data(as_text=True)
    assert 'content="0; url=/dashboard/"' in page


@pytest.mark.sampled(every=4)
def test_what_the_provider_says_is_shown_as_text(world: World, provider: LyingProvider) -> None:
    said = "<script>alert(1)</script>"
    page = come_back(Visitor(world), provider, error="access_denied", error_description=said)
    assert said not in page
    provider.answer = {"error": "invalid_grant", "error_description": said}
    page = come_back(Visitor(world), provider)
    assert said not in page
    assert "refuses the code" in page
