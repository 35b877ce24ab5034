"""A task's page in a browser while rounds run: each question is answered within two seconds of what happened."""

# ruff: noqa: F401, F811 (fixtures are imported and then arguments)
from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import urllib3
from playwright.sync_api import Browser, expect

from archipel.operator import OperatorClient, TaskRequest
from tests.server.rounds.test_evaluating import PLAIN, evaluate
from tests.server.rounds.test_leaving import leave
from tests.server.rounds.test_plain_rounds import update
from tests.support.devices import ANSWERED, Device
from tests.support.fixtures.chromium import chromium
from tests.support.fixtures.dashboard import Tab, served_world, tab
from tests.support.serving import Server
from tests.support.visitors import access_token
from tests.support.world import DataFolder, World

SOON = 2000.0
"""Milliseconds."""
STOP_SECONDS = 20


@pytest.mark.sampled(every=6)
def test_the_five_questions_within_two_seconds(world: World, chromium: Browser) -> None:
    task = world.create_task(rounds=2, evaluate_every=1, **{**PLAIN, "cohort": 4, "min_cohort": 3})["task_id"]
    devices = world.add_devices(4)
    token, token_id = access_token(world, "auditor")
    with served_world(world) as address, tab(chromium, address) as at:
        at.log_in(token)
        page = at.open(f"/dashboard/tasks/{task}")
        which, success, told = page.locator("#live-which"), page.locator("#live-success"), page.locator("#live-sum")
        model, failed, news = page.locator("#live-model"), page.locator("#live-failed"), page.locator("#live-news")
        expect(page.locator("#live-link")).to_have_text("Live: news comes by itself.", timeout=SOON)
        expect(which).to_contain_text("none under way")

        world.start_round(devices)
        expect(which).to_contain_text("updating", timeout=SOON)
        expect(news).to_contain_text("Round 1: updating", timeout=SOON)
        seconds = page.locator("#live-which [data-since]")
        before = seconds.text_content()
        expect(seconds).not_to_have_text(before or "", timeout=SOON)
        # Who reads with the keyboard is not thrown back to the beginning of the page.
        page.locator("#live-phases").focus()
        assert leave(devices[0])[0] == 200
        for index, device in enumerate(devices[1:3]):
            device.updating(**update(index))
        expect(page.locator("#live-phases")).to_contain_text("2 of 3 updated", timeout=SOON)
        expect(failed).to_contain_text("2of 4 devices of round 1", timeout=SOON)
        expect(page.locator("#live-missing")).to_contain_text("it left the round")
        assert page.evaluate("document.activeElement.id") == "live-phases"

        devices[3].updating(**update(2))
        world.settle()
        expect(success).to_contain_text("1of 2 rounds; the last one committed", timeout=SOON)
        expect(model).to_contain_text(world.task(task)["model"][:12], timeout=SOON)
        expect(news).to_contain_text("Round 1: committed", timeout=SOON)
        numbers = page.locator("#curve-length-of-the-step")
        numbers.locator("summary").click()
        evaluate(world, devices, 0.5)
        expect(told).to_contain_text("evaluation loss 0.5", timeout=SOON)
        # The curves come along; what was open stays open, and the keyboard stays where it is.
        expect(page.locator("#live-curves")).to_contain_text("evaluation loss", timeout=SOON)
        expect(numbers).to_have_attribute("open", "")
        assert page.evaluate("document.activeElement.id") == "curve-length-of-the-step-title"

        assert world.operator("POST", f"/v1/tokens/{token_id}/revoke")[0] == 200
        expect(page.locator("#live-link")).to_contain_text("No longer live: your session has ended", timeout=8000)


@pytest.fixture
def server(data_folder: DataFolder) -> Iterator[Server]:
    made = Server(data_folder[0])
    made.start(stop_seconds=str(STOP_SECONDS))
    yield made
    if made.alive:
        made.stop()


class Crowd:
    """Scripted devices that talk to a real server over HTTP, many at once."""

    def __init__(self, server: Server, data_folder: DataFolder, number: int) -> None:
        self._server, self._pool = server, urllib3.PoolManager(maxsize=number)
        with OperatorClient(server.url, data_folder[1]) as operator:
            key = operator.server.info().server_key
        # No more at once than the server takes of strangers from one address.
        self._threads = ThreadPoolExecutor(6)
        self.devices = [Device(self._send, data_folder[2], key, not_after=2e9) for _ in range(number)]
        self.each(lambda device: device.enrol().open_session())

    def _send(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        response = self._pool.request(method, self._server.url + path, body=body, headers=headers)
        return response.status, response.data

    def each(self, work: Callable[[Device], object]) -> None:
        list(self._threads.map(work, self.devices))

    def join(self) -> None:
        """Come until all are in a round."""
        left = {device.id for device in self.devices}

        def come(device: Device) -> None:
            if device.id in left and device.join():
                left.discard(device.id)

        ends = time.monotonic() + 60
        while left:
            assert time.monotonic() < ends
            self.each(come)

    def await_phase(self, phase: str) -> None:
        ends = time.monotonic() + 60
        while self.devices[0].status().phase != phase:
            assert time.monotonic() < ends
            time.sleep(0.02)


def watched(
    chromium: Browser, server: Server, data_folder: DataFolder, bundle: Path, number: int, rounds: int
) -> list[float]:
    """Rounds of so many devices on a page; the seconds from each phase's end to the screen."""
    took = []
    with OperatorClient(server.url, data_folder[1]) as operator, tab(chromium, server.url) as at:
        digest = operator.bundles.upload(bundle).digest
        request = TaskRequest(
            name="crowd", population="pupils", bundle=digest, rounds=rounds, min_cohort=3, cohort=number,
            protocol="complete",
        )  # fmt: skip
        task = operator.tasks.create(request).task_id
        at.log_in(data_folder[1])
        page = at.open(f"/dashboard/tasks/{task}")
        expect(page.locator("#live-link")).to_have_text("Live: news comes by itself.")
        crowd = Crowd(server, data_folder, number)

        def see(words: str) -> None:
            since = time.monotonic()
            expect(page.locator("#live")).to_contain_text(words, timeout=20_000)
            took.append(time.monotonic() - since)

        for round_number in range(1, rounds + 1):
            crowd.join()
            for phase, following in zip(ANSWERED, (*ANSWERED[1:], None)):
                crowd.each(lambda device, phase=phase: device.answer(phase))  # type: ignore[misc]
                if following is not None:
                    crowd.await_phase(following)
                    see(following)
            see(f"of {rounds} rounds; the last one committed" if round_number == rounds else "committed")
        expect(page.locator("#live-success")).to_contain_text(f"{rounds}of {rounds} rounds")
        expect(page.locator("#live-state")).to_have_text("completed")
        assert at.errors == []
    return took


@pytest.mark.sampled(every=6)
def test_rounds_on_a_real_server_which_is_restarted(
    chromium: Browser, server: Server, data_folder: DataFolder, bundle_file: Path
) -> None:
    took = watched(chromium, server, data_folder, bundle_file, number=5, rounds=1)
    assert max(took) < 2.0, took
    port = int(server.url.rpartition(":")[2])
    with OperatorClient(server.url, data_folder[1]) as operator:
        task = next(iter(operator.tasks.list())).task_id
        context = chromium.new_context()
        at = Tab(context.new_page(), server.url)
        at.log_in(data_folder[1])
        page = at.open(f"/dashboard/tasks/{task}")
        link = page.locator("#live-link")
        expect(link).to_have_text("Live: news comes by itself.")
        began = time.monotonic()
        assert server.stop() == 0
        # Open pages do not keep it from ending: it would wait for them so long.
        assert time.monotonic() - began < STOP_SECONDS
        expect(link).to_contain_text("The connection is lost", timeout=3 * SOON)
        server.start(port, stop_seconds=str(STOP_SECONDS))
        expect(link).to_have_text("Live: news comes by itself.", timeout=15_000)
        context.close()


@pytest.mark.slow
def test_rounds_of_fifty_devices(chromium: Browser, server: Server, data_folder: DataFolder, bundle_file: Path) -> None:
    took = watched(chromium, server, data_folder, bundle_file, number=50, rounds=3)
    print(f"seconds from a phase's end to the screen: median {sorted(took)[len(took) // 2]:.2f}, most {max(took):.2f}")
    assert max(took) < 2.0, took
