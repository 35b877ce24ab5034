"""Attacks on who looks at the dashboard: texts that would be scripts or tags, from everybody who can place a text."""

# ruff: noqa: F401, F811  (fixtures are imported)
from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser

import pytest

from archipel.bundle import ModelCard
from tests.support.busy_server import fill_server
from tests.support.devices import POPULATION
from tests.support.fixtures.server import (
    bundle_file,
    bundle_maker,
    data_folder,
    empty_database,
    keys,
    server_settings,
    world,
)
from tests.support.fleet import MODEL, Fleet
from tests.support.tiny_bundle import make_bundle
from tests.support.visitors import Visitor, access_token
from tests.support.world import World

EVIL = (
    "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "'><svg/onload=alert(1)>", "{{ 7 * 7 }}",
    "javascript:alert(1)", "</title><script>alert(1)</script>",
)  # fmt: skip


class Tags(HTMLParser):
    """What a browser would take for tags: names, addresses, and attributes with code."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.scripts: list[str | None] = []
        self.code: list[str] = []
        self.addresses: list[str] = []
        self.names: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        given = dict(attrs)
        if tag == "script":
            self.scripts.append(given.get("src"))
        self.code += [name for name in given if name.startswith("on") or name == "style"]
        self.addresses += [given[name] or "" for name in ("href", "src", "action") if name in given]


def check(html: str) -> None:
    found = Tags(html)
    name = re.compile(r"/dashboard/static/(dashboard|live|insight)\.js\?v=[0-9a-f]{12}")
    files = [match and match[1] for match in (name.fullmatch(each or "") for each in found.scripts)]
    assert files in (["dashboard"], ["dashboard", "live"], ["insight"]), found.scripts
    assert found.code == []
    # Not even a picture or a link to elsewhere.
    assert [each for each in found.addresses if not each.startswith(("/dashboard/", "#"))] == []
    assert found.names <= KNOWN, found.names - KNOWN


KNOWN = {
    "html", "head", "meta", "title", "link", "script", "body", "a", "header", "img", "nav", "ul", "li", "div",
    "p", "form", "input", "button", "main", "h1", "h2", "h3", "section", "dl", "dt", "dd", "small", "span", "table",
    "thead", "tbody", "tr", "th", "td", "code", "progress", "time", "label", "select", "option", "textarea",
    "datalist", "caption", "figure", "figcaption", "svg", "line", "text", "path", "g", "circle", "details",
    "summary", "noscript",
}  # fmt: skip


@pytest.fixture
def looker(world: World) -> Visitor:
    return Visitor(world, world.operator_token)


@pytest.mark.parametrize("text", EVIL)
@pytest.mark.sampled(every=4)
def test_a_text_of_an_operator_is_a_text(world: World, looker: Visitor, text: str) -> None:
    fleet = Fleet(world).create(2)
    fleet.post(f"models/{MODEL}/versions/2/reject", {"reason": text})
    html = looker.page(f"/dashboard/models/{MODEL}/versions/2")
    check(html)
    assert text in looker.words(f"/dashboard/models/{MODEL}/versions/2")
    html = looker.page("/dashboard/audit")
    check(html)
    # Names have letters, digits and a few signs alone.
    for field in ("name", "population"):
        values = {"name": "a", "population": "b", field: text}
        assert world.operator("POST", "/v1/models", values)[0] == 400


@pytest.mark.parametrize("text", EVIL)
@pytest.mark.sampled(every=4)
def test_a_bundle_s_name_and_model_card_are_texts(world: World, looker: Visitor, text: str) -> None:
    card = ModelCard(name=text, description=text, task=text, licence=text)
    file = make_bundle(world.settings.path("."), world.keys.publisher, name=text, card=card)
    status, made = world.operator("POST", "/v1/bundles", file.read_bytes())
    assert status == 201
    fleet = Fleet(world)
    fleet.post("models", {"name": MODEL, "population": POPULATION}, 201)
    fleet.post(f"models/{MODEL}/versions", {"bundle": made["digest"]}, 201)
    check(looker.page(f"/dashboard/models/{MODEL}/versions/1"))
    assert looker.words(f"/dashboard/models/{MODEL}/versions/1").count(text) == 4
    for path in (f"/dashboard/bundles/{made['digest']}", "/dashboard/bundles", "/dashboard/tasks/new"):
        check(looker.page(path))
        assert text in unescape(looker.page(path))


@pytest.mark.parametrize("text", EVIL)
@pytest.mark.sampled(every=8)
def test_an_address_puts_no_tags_on_a_page(world: World, looker: Visitor, text: str) -> None:
    for path in (
        "/dashboard/login",
        "/dashboard/tasks",
        "/dashboard/devices",
        "/dashboard/tasks/new",
        "/dashboard/bundles",
        "/dashboard/",
    ):
        for name in ("next", "state", "starts", "name", "done", "after", "population", "versions"):
            answer = looker.client.get(path, base_url=looker.base, query_string={name: text})
            assert answer.status_code < 500, (path, name)
            if answer.status_code != 303:
                check(answer.get_data(as_text=True))
    check(looker.client.get(f"/dashboard/{text}", base_url=looker.base).get_data(as_text=True))
    check(looker.post("/dashboard/tasks/new", name=text, population=text, more=text).get_data(as_text=True))
    check(Visitor(world).log_in(text, next=text).get_data(as_text=True))


def test_attributes_of_devices_are_on_no_page(world: World, looker: Visitor) -> None:
    world.create_task()
    (device,) = world.add_devices(1)
    device.attributes = {"region": "<script>alert(1)</script>", "model": "hush-3141"}
    device.check_in()
    for path in ("/dashboard/devices", f"/dashboard/devices/{device.id}", f"/dashboard/populations/{POPULATION}"):
        html = looker.page(path)
        check(html)
        assert "hush-3141" not in html
        assert "alert" not in html


@pytest.fixture
def busy(world: World) -> dict[str, str]:
    return fill_server(world, rounds=1)


@pytest.mark.sampled(every=6)
def test_somebody_of_another_population_finds_nothing_on_any_page(world: World, busy: dict[str, str]) -> None:
    """Names, ids and digests of what there is, on all pages that a token for another population opens."""
    for page in busy.values():
        check(Visitor(world, world.operator_token).page(page))
    ids = {part for page in busy.values() for part in page.split("/") if len(part) in (32, 64)}
    secrets = {POPULATION, "spring", "autumn", "night-shift", *ids}
    lists = ("overview", "populations", "devices", "tasks", "models", "rollouts", "bundles")
    for role in ("operator", "analyst", "auditor"):
        stranger = Visitor(world, access_token(world, role, populations=["elsewhere"])[0])
        for name, page in busy.items():
            answer = stranger.get(page)
            html = answer.get_data(as_text=True)
            if name in lists or name in ("new-task", "new-model", "upload"):
                assert answer.status_code == 200 or role != "operator"
                assert [each for each in secrets if each in html] == [], (role, name)
            else:
                # The path, which the stranger has asked for, may be said again; nothing else.
                assert answer.status_code in (403, 404), (role, name)
                assert [each for each in secrets if each in html and each not in page] == [], (role, name)
