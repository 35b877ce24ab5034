"""The demo page joins the federation of its server, and trains the common network with what was drawn on it."""

# ruff: noqa: F401, F811 (fixtures are imported and then arguments)
from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, expect

from archipel.bundle import PrivacyPolicy
from archipel.converter import Signing, Training, convert
from archipel.models import digits_cnn
from archipel.protocol.sealed import encode
from archipel.server.http.pages import PAGE_FOLDER
from archipel.training import losses, optimizers
from tests.support.federation import Federation, open_federation
from tests.support.fixtures.chromium import chromium, needed
from tests.support.fixtures.demo_page import FOUR, TWO, Demo


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    if not (PAGE_FOLDER / "index.html").is_file():
        needed("needs the demo page; `make web` builds it")
    with open_federation(tmp_path, "127.0.0.1", demo=True) as made:
        yield made


def publish_digits(federation: Federation) -> str:
    """The demo's network as this federation's publisher signs it; its digest."""
    file = federation.folder / "digits.bundle"
    convert(
        digits_cnn(0),
        file,
        example=np.zeros((2, 1, 28, 28), np.float32),
        name="digits",
        training=Training(losses.cross_entropy(), optimizers.sgd(lr=0.05), epochs=1, batch_size=4),
        signing=Signing(federation.publisher_key),
        privacy=PrivacyPolicy(
            modes=("secure",), min_cohort=3, threshold=0.6, max_clip=10.0, max_bits=24, colluders=0.0
        ),
    )
    return federation.operator.bundles.upload(file).digest


@pytest.mark.sampled(every=8)
def test_what_is_drawn_trains_the_common_network(chromium: Browser, federation: Federation) -> None:
    bundle = publish_digits(federation)
    examples = np.random.default_rng(0).random((8, 1, 28, 28)).astype(np.float32), np.arange(8, dtype=np.int64)
    agents = [
        federation.agent(number, examples=lambda: {"input": examples[0], "label": examples[1]}) for number in (0, 1)
    ]
    token = {"name": "token.json", "mimeType": "application/json", "buffer": encode(federation.token())}
    with chromium.new_context() as context:
        demo = Demo(context.new_page(), f"{federation.url}/demo/").open()
        demo.page.locator("#automatic").uncheck()
        for shape, digit in ((TWO, 2), (FOUR, 4)):
            demo.draw(shape)
            demo.expect_answer(digit)
            demo.label(digit)
        # Nothing of the device was loaded, and nobody was asked for anything, before somebody joins.
        assert not [url for url in demo.requests if "device" in url or "/v1/" in url]
        demo.page.locator("#token").set_input_files({**token, "buffer": b"{}"})
        demo.page.locator("#join").click()
        demo.expect("federation", re.compile("not an enrolment token; choose the file"))
        demo.page.locator("#token").set_input_files(token)
        demo.page.locator("#join").click()
        demo.expect("federation", "Joined. Waiting for a round.")
        task = federation.task(bundle=bundle, rounds=1, min_cohort=3, cohort=3, threshold=2)
        stop = threading.Event()
        threads = [threading.Thread(target=agent.run_forever, args=(stop,)) for agent in agents]
        for thread in threads:
            thread.start()
        try:
            demo.expect("federation", re.compile("Your masked update was in a round."))
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        # A phone that is turned has another width: nothing stands out at the side.
        demo.page.set_viewport_size({"width": 390, "height": 844})
        demo.page.wait_for_function("() => document.documentElement.scrollWidth === 390")
        (committed,) = federation.rounds(task)
        assert (committed.phase, len(committed.survivors)) == ("committed", 3)
        # It is a device of this page again after a reload, also where it rests; and no more once it has left.
        demo.page.locator("#rest").click()
        demo.expect("federation", re.compile("^Paused."))
        demo.open().expect("federation", "Paused.")
        demo.page.locator("#rest").click()
        demo.expect("federation", "Joined. Waiting for a round.")
        demo.page.locator("#leave").click()
        demo.expect("federation", re.compile("^You have left."))
        demo.open().expect("federation", "Not joined.")
        assert demo.complaints == []
        assert {url.split("/")[2] for url in demo.requests} == {federation.url.split("/")[2]}
