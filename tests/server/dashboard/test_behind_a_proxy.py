"""A task's page behind a proxy that cuts silent connections off: it goes on, and does not say that it is lost."""

# ruff: noqa: F401, F811 (fixtures are imported and then arguments)
from __future__ import annotations

import time

import pytest
from playwright.sync_api import Browser, expect

from tests.server.rounds.test_plain_rounds import update
from tests.support.fixtures.chromium import chromium
from tests.support.fixtures.dashboard import Tab, served_world, tab
from tests.support.idle_proxy import cutting
from tests.support.patience import stretched
from tests.support.visitors import access_token
from tests.support.world import World

IDLE = 1.0
"""Seconds. Nothing goes over a page's stream for longer than that where no round runs."""
WATCH = """() => {
  const link = document.getElementById("live-link");
  window.heard = [];
  new MutationObserver(() => window.heard.push(link.textContent))
    .observe(link, { characterData: true, childList: true, subtree: true });
}"""


@pytest.mark.sampled(every=3)
def test_a_stream_that_is_cut_off_goes_on(world: World, chromium: Browser) -> None:
    task = world.create_task(rounds=2, privacy="plain", threshold=None, cohort=3)["task_id"]
    devices = world.add_devices(3)
    token, _ = access_token(world, "auditor")
    with (
        served_world(world) as address,
        cutting(int(address.rpartition(":")[2]), IDLE) as proxy,
        tab(chromium, proxy.url) as at,
    ):
        at.log_in(token)
        page = at.open(f"/dashboard/tasks/{task}")
        expect(page.locator("#live-link")).to_have_text("Live: news comes by itself.")
        page.evaluate(WATCH)
        before, deadline = len(proxy.cuts), time.monotonic() + stretched(20)
        while len(proxy.cuts) < before + 2:
            assert time.monotonic() < deadline
            page.wait_for_timeout(100)
        world.start_round(devices)
        expect(page.locator("#live-which")).to_contain_text("updating", timeout=6_000)
        for index, device in enumerate(devices):
            device.updating(**update(index))
        world.settle()
        expect(page.locator("#live-which")).to_contain_text("the last one was 1", timeout=6_000)
        assert page.evaluate("window.heard") == []
        # Chromium notes each cut, which is no error of the page.
        assert {text.rpartition("net::")[2] for text in at.errors} == {"ERR_INCOMPLETE_CHUNKED_ENCODING"}
        at.errors.clear()
