"""The inside of a version in a browser: unfolded by keyboard, compared with another one, on a phone and a desktop."""

# ruff: noqa: F401, F811 (fixtures are imported and then arguments)
from __future__ import annotations

import onnx
import pytest
from playwright.sync_api import Browser, expect

from tests.support.fixtures.chromium import chromium
from tests.support.fixtures.dashboard import SIZES, Tab, served_world, tab
from tests.support.fixtures.insight import models
from tests.support.fleet import MODEL
from tests.support.world import World

VERSION = f"/dashboard/models/{MODEL}/versions/1"
MADE = 60_000.0
"""Milliseconds until the server has read a model."""


def check(at: Tab, where: str) -> None:
    assert at.findings() == [], where
    assert at.overflow() == 0, where


@pytest.mark.sampled(every=3)
def test_a_version_is_opened_unfolded_and_compared(world: World, chromium: Browser, models: list[str]) -> None:
    graph = onnx.load(world.settings.bundle_folder / models[0] / "train.onnx", load_external_data=False).graph
    with served_world(world) as address, tab(chromium, address) as at:
        at.log_in(world.operator_token)
        page = at.open(VERSION)
        page.get_by_role("link", name="Look inside").press("Enter")
        boxes = page.locator("svg.graph .box")
        expect(boxes.first).to_be_visible(timeout=MADE)
        page.locator("#graph-choice").select_option(label=f"train ({len(graph.node)} nodes)")
        page.get_by_role("button", name="Fold all", exact=True).press("Enter")
        folded = boxes.count()
        scope = page.locator("svg.graph .box.folded", has_text="loss").first
        assert scope.get_attribute("aria-label") == (
            f"scope loss, {sum(node.name.startswith('loss/') for node in graph.node)} nodes"
        )
        scope.focus()
        page.keyboard.press("Enter")
        expect(page.locator("svg.graph .frame")).to_have_attribute("aria-expanded", "true")
        assert boxes.count() > folded
        check(at, "graph")
        views = page.get_by_role("navigation", name="Views")
        views.get_by_role("link", name="Times").click()
        expect(page.get_by_text("this server runs none")).to_be_visible()
        views.get_by_role("link", name="Histograms").click()
        expect(page.get_by_role("img", name="4.weight: histograms of 2 versions")).to_be_visible(timeout=MADE)
        check(at, "histograms")

        page.get_by_label("Beside").select_option(label="version 2")
        page.get_by_role("button", name="Show").press("Enter")
        row = page.get_by_role("table", name="Distance of each tensor").get_by_role("row", name="4.weight")
        # 5 x 64 numbers, each larger by 0.5: the root of 320 / 4.
        expect(row).to_contain_text("8.944", timeout=MADE)
        expect(page.get_by_role("columnheader", name="version 2").first).to_be_visible()
        # Nothing is measured at a server, so there is no row of times without numbers.
        beside = page.locator("table", has=page.get_by_role("columnheader", name="of the two"))
        assert beside.locator("tbody tr > :first-child").all_text_contents() == [
            "nodes", "bytes of tensors", "FLOPs for one example", "peak of activations",
        ]  # fmt: skip
        check(at, "comparison")


@pytest.mark.slow
@pytest.mark.parametrize("size", list(SIZES))
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_of_it(world: World, chromium: Browser, models: list[str], size: str, scheme: str) -> None:
    with served_world(world) as address, tab(chromium, address, size, scheme) as at:  # type: ignore[arg-type]
        at.log_in(world.operator_token)
        page = at.open(f"{VERSION}/insight?with=2")
        views = page.get_by_role("navigation", name="Views").get_by_role("link")
        expect(views).to_have_count(7, timeout=MADE)
        for view in views.all():
            view.click()
            if view.text_content() == "Histograms":
                expect(page.get_by_role("img").first).to_be_visible(timeout=MADE)
            check(at, f"{view.text_content()} {size} {scheme}")
