"""The demo for those who use a keyboard, a phone or a slow connection."""

# ruff: noqa: F401, F811 (fixtures are imported and then arguments)
from __future__ import annotations

import pytest
from playwright.sync_api import expect

from archipel.server.http.pages import PAGE_FOLDER
from tests.support.fixtures.chromium import chromium
from tests.support.fixtures.demo_page import (
    ONE_LIKE_SEVEN,
    READY,
    Demo,
    address,
    demo,
    serve,
    settings,
)


@pytest.mark.sampled(every=8)
def test_the_focus_stays_and_the_keys_can_be_switched_off(demo: Demo) -> None:
    demo.open()
    demo.draw(ONE_LIKE_SEVEN)
    demo.page.locator("#clear").focus()
    demo.page.keyboard.press("Enter")
    expect(demo.page.locator("#pad")).to_be_focused()
    demo.page.locator("#automatic").uncheck()
    for count in range(1, 3):
        demo.draw(ONE_LIKE_SEVEN, moved=0.02 * count)
        demo.page.keyboard.press("1")
        expect(demo.page.locator("#own li")).to_have_count(count)
    demo.page.locator("#train").focus()
    demo.page.keyboard.press("Enter")
    demo.learned(2)
    expect(demo.page.locator("#train")).to_be_focused()
    demo.page.locator("#own button").first.focus()
    demo.page.keyboard.press("Enter")
    expect(demo.page.locator("#own li")).to_have_count(1)
    expect(demo.page.locator("#own button")).to_be_focused()
    demo.page.keyboard.press("Enter")
    expect(demo.page.locator("#own-title")).to_be_focused()
    # A setting of the page, which outlives it.
    demo.page.locator("#keys").uncheck()
    demo.page.reload()
    demo.expect("status", READY)
    assert not demo.page.locator("#keys").is_checked()
    demo.draw(ONE_LIKE_SEVEN)
    for key in ("1", "Escape"):
        demo.page.keyboard.press(key)
    demo.page.wait_for_timeout(200)
    assert demo.page.locator("#own li").count() == 0
    assert demo.page.locator("#clear").is_enabled()


@pytest.mark.parametrize(("width", "height"), [(390, 844), (360, 640)])
@pytest.mark.sampled(every=4)
def test_on_a_phone_the_answer_is_seen_while_one_draws(demo: Demo, width: int, height: int) -> None:
    demo.page.set_viewport_size({"width": width, "height": height})
    demo.open()
    boxes = {name: demo.page.locator(f"#{name}").bounding_box() for name in ("answer", "pad")}
    answer, pad = boxes["answer"], boxes["pad"]
    assert answer is not None
    assert pad is not None
    assert answer["y"] >= 0
    assert answer["y"] + answer["height"] <= pad["y"]
    assert pad["y"] + pad["height"] / 2 < height
    assert demo.page.evaluate("document.documentElement.scrollWidth") <= width
    if height > 800:
        assert pad["y"] + pad["height"] <= height


@pytest.mark.sampled(every=4)
def test_the_download_is_told(demo: Demo) -> None:
    demo.page.add_init_script("""
        window.told = [];
        addEventListener("DOMContentLoaded", () => {
            const status = document.querySelector("#status");
            new MutationObserver(() => window.told.push(status.textContent)).observe(status, { childList: true });
        });
    """)
    demo.open()
    told = demo.page.evaluate("window.told")
    size = -(-(PAGE_FOLDER / "model" / "digits.bundle").stat().st_size // 1024)
    assert f"Loading the network: {size} of {size} KiB…" in told
    assert "Loading what runs the network…" in told
