"""The dashboard in a browser: no error, no finding of axe, nothing wider than the window, and an operator's way."""

# ruff: noqa: F401, F811 (fixtures are imported and then arguments)
from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.support.busy_server import fill_server
from tests.support.devices import POPULATION
from tests.support.fixtures.chromium import chromium
from tests.support.fixtures.dashboard import SIZES, Scheme, Size, Tab, served_world, tab
from tests.support.world import World

QUICK = ("overview", "task", "model", "new-task")


def look_at(browser: Browser, world: World, paths: dict[str, str], size: Size, scheme: Scheme) -> None:
    with served_world(world) as address, tab(browser, address, size, scheme) as at:
        at.open("/dashboard/login")
        assert at.findings() == []
        at.log_in(world.operator_token)
        for name, path in paths.items():
            at.open(path)
            expect(at.page.locator("main > *").first).to_be_attached(timeout=60_000)
            assert at.findings() == [], (name, size, scheme)
            assert at.overflow() == 0, (name, size)


@pytest.mark.sampled(every=6)
def test_pages_on_a_phone_have_no_findings_and_no_errors(world: World, chromium: Browser) -> None:
    paths = fill_server(world, rounds=1)
    look_at(chromium, world, {name: paths[name] for name in QUICK}, "phone", "dark")


@pytest.mark.slow
def test_every_page_at_every_size_in_every_scheme(world: World, chromium: Browser) -> None:
    paths = fill_server(world, rounds=6)
    for size, scheme in itertools.product(SIZES, ("light", "dark")):
        look_at(chromium, world, paths, size, scheme)  # type: ignore[arg-type]


@pytest.fixture
def operator(world: World, chromium: Browser) -> Iterator[Tab]:
    with served_world(world) as address, tab(chromium, address) as at:
        at.log_in(world.operator_token)
        yield at


@pytest.mark.sampled(every=6)
def test_a_new_task_by_keyboard(world: World, operator: Tab) -> None:
    bundle = world.publish()
    page = operator.open("/dashboard/tasks/new")
    for label, value in (("Name", "spring"), ("Population", POPULATION), ("Bundle", bundle)):
        page.get_by_label(label, exact=True).fill(value)
    page.get_by_label("Devices in a round").fill("5")
    page.get_by_label("Fewest devices of a round").fill("3")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("New task?")
    assert world.operator("GET", "/v1/tasks")[1]["items"] == []
    page.get_by_role("button", name="New task").press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("spring")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"


def upload(at: Tab, file: Path) -> str:
    """Upload a bundle from the page of models, and return its digest."""
    page = at.page
    for link in ("Models", "Bundles", "Upload a bundle"):
        page.get_by_role("link", name=link, exact=True).first.click()
    page.get_by_label("File").set_input_files(file)
    page.get_by_role("button", name="Upload").click()
    expect(page.get_by_text("The bundle is on the server.")).to_be_visible()
    return page.url.split("?")[0].rsplit("/", 1)[1]


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("scripts", [True, False], ids=["", "without scripts"])
def test_a_bundle_is_uploaded_and_what_is_none_is_refused(
    world: World, chromium: Browser, tmp_path: Path, scripts: bool
) -> None:
    (tmp_path / "no.bundle").write_bytes(b"PK\x03\x04" + bytes(300_000))
    with served_world(world) as address, tab(chromium, address, scripts=scripts) as at:
        page = at.page
        at.log_in(world.operator_token)
        at.open("/dashboard/bundles/upload")
        page.get_by_label("File").set_input_files(tmp_path / "no.bundle")
        page.get_by_role("button", name="Upload").click()
        expect(page.get_by_text("The body is not a bundle that this server accepts")).to_be_visible()
        expect(page.get_by_role("button", name="Upload")).to_be_enabled()
        assert all("422" in each for each in at.errors)
        at.errors.clear()
        digest = upload(at, world.bundle_file)
        assert world.operator("GET", f"/v1/bundles/{digest}")[0] == 200


@pytest.mark.slow
@pytest.mark.parametrize("size", list(SIZES))
def test_from_an_empty_server_to_a_model_that_is_rolled_back(world: World, chromium: Browser, size: Size) -> None:
    devices = world.add_devices(5)
    with served_world(world) as address, tab(chromium, address, size) as at:
        page = at.page
        at.log_in(world.operator_token)

        def say(button: str) -> None:
            page.get_by_role("button", name=button, exact=True).click()

        def do(link: str, told: str) -> None:
            page.get_by_role("link", name=link, exact=True).click()
            say(link)
            expect(page.get_by_text(told)).to_be_visible()

        bundle = upload(at, world.bundle_file)
        page.get_by_role("link", name="Tasks", exact=True).click()
        page.get_by_role("link", name="New task", exact=True).click()
        for label, value in (
            ("Name", "spring"), ("Population", POPULATION), ("Bundle", bundle), ("Rounds", "1"),
            ("Devices in a round", "5"), ("Fewest devices of a round", "3"),
        ):  # fmt: skip
            page.get_by_label(label, exact=True).fill(value)
        say("Go on")
        say("New task")
        do("Pause", "The task is paused.")
        do("Resume", "The task goes on.")
        world.start_round(devices)
        world.run_to("committed", devices)
        world.settle()
        page.reload()
        expect(page.locator("h1 + .state")).to_have_text("completed")
        task_id = page.url.split("?")[0].rsplit("/", 1)[1]
        page.get_by_role("region", name="Rounds").get_by_role("link", name="1").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Round 1")

        page.get_by_role("link", name="Models", exact=True).click()
        page.get_by_role("link", name="New model").click()
        page.get_by_label("Name").fill("digits")
        page.get_by_label("Population").fill(POPULATION)
        say("Go on")
        say("New model")
        for label, value in (("A bundle as it is", bundle), ("Or what a training made of its bundle", task_id)):
            at.open("/dashboard/models/digits")
            page.get_by_role("link", name="Register a version").click()
            page.get_by_label(label).fill(value)
            say("Go on")
            say("Register a version")
        at.open("/dashboard/models/digits/versions/1")
        do("Promote to all devices", "The version was promoted.")
        at.open("/dashboard/models/digits/versions/2")
        page.get_by_role("link", name="Roll out").click()
        page.get_by_label("Metric of the gate").fill("")
        say("Go on")
        say("Roll out")
        do("Abort", "The rollout was aborted.")
        at.open("/dashboard/models/digits/versions/2")
        do("Promote to all devices", "The version was promoted.")
        at.open("/dashboard/models/digits")
        do("Roll back", "The model was rolled back.")
        assert world.operator("GET", "/v1/models/digits")[1]["promoted"] == 1
        say("Log out")
        assert page.url.endswith("/dashboard/login")
        page.go_back()
        expect(page.get_by_role("heading", level=1)).to_have_text("Log in")
