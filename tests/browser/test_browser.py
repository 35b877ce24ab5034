"""The browser demo in a real Chromium: a mouse draws, the page learns, and what it learned is there after a reload."""

# ruff: noqa: F401, F811 (fixtures are imported and then arguments)
from __future__ import annotations

import base64
import gzip
import io
import json
import re
import subprocess
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from archipel import lite_runtime as lite
from archipel.bundle import generate_key
from archipel.server.http.pages import PAGE_FOLDER
from tests.support.fixtures.chromium import chromium
from tests.support.fixtures.demo_page import (
    FOUR,
    ONE_LIKE_SEVEN,
    READY,
    TWO,
    WEB,
    ZERO,
    Demo,
    address,
    demo,
    serve,
    settings,
)


@pytest.fixture(scope="module")
def driven(serve: Callable[[Path], str], address: str) -> str:
    """The address of a page that has the library and does what tests tell it."""
    folder = WEB / "tests" / "browser"
    build = ["node_modules/.bin/vite", "build", "--logLevel", "error", str(folder)]
    subprocess.run(build, cwd=WEB, check=True, timeout=120)
    return serve(folder / "dist")


@pytest.mark.sampled(every=4)
def test_it_reads_digits_and_talks_to_nobody_else(demo: Demo) -> None:
    coding: dict[str, str | None] = {}
    demo.page.on("response", lambda answer: coding.update({answer.url: answer.headers.get("content-encoding")}))
    demo.open()
    large = [url for url in coding if url.endswith((".js", ".css", ".wasm", ".bin"))]
    assert len(large) > 5
    assert {coding[url] for url in large} == {"gzip"}
    assert "WebAssembly" in demo.text("facts")
    for shape, digit in ((ZERO, 0), (TWO, 2), (FOUR, 4), (ONE_LIKE_SEVEN, 7)):
        demo.draw(shape)
        demo.expect_answer(digit)
    assert {urlsplit(url).netloc for url in demo.requests} == {urlsplit(demo.address).netloc}
    loaded = len(demo.requests)
    demo.label(1)
    demo.learned(1)
    # Once it is there, it asks for nothing at all.
    assert demo.requests[loaded:] == []
    assert demo.complaints == []
    assert demo.page.evaluate("crossOriginIsolated")


@pytest.mark.sampled(every=8)
def test_it_asks_a_busy_server_again(demo: Demo) -> None:
    refused: dict[str, float] = {}
    early: list[str] = []

    def busy(route: Route) -> None:
        name = urlsplit(route.request.url).path.rsplit("/", 1)[1]
        if name not in refused:
            refused[name] = time.monotonic()
            route.fulfill(status=503 if name.endswith(".wasm") else 429, headers={"Retry-After": "1"}, body="busy")
            return
        if time.monotonic() - refused[name] < 0.9:
            early.append(name)
        route.continue_()

    demo.page.route(re.compile(r"/model/|\.wasm$"), busy)
    demo.open()
    assert len(refused) == 5
    assert sum(name.endswith(".wasm") for name in refused) == 1
    assert early == []
    demo.draw(TWO)
    demo.expect_answer(2)


@pytest.mark.sampled(every=8)
def test_it_learns_it_remembers_and_it_can_be_reset(demo: Demo) -> None:
    demo.open()
    published = demo.share("check-before")
    assert published >= 95
    for count in range(1, 5):
        demo.draw(ONE_LIKE_SEVEN, moved=0.02 * (count - 2))
        if count == 1:
            demo.expect_answer(7)
        demo.label(1)
        demo.learned(count)
    assert demo.page.locator("#own li").count() == 4
    steps = demo.steps
    assert steps >= 4 * 30
    assert painted(demo.page, "#chart canvas")
    demo.draw(ONE_LIKE_SEVEN)
    demo.expect_answer(1)
    assert (demo.share("own-before"), demo.share("own-after")) == (0, 100)
    assert demo.share("check-after") >= published - 5

    demo.page.reload()
    demo.expect("status", READY)
    assert demo.steps == steps
    assert demo.page.locator("#own li").count() == 4
    demo.draw(ONE_LIKE_SEVEN)
    demo.expect_answer(1)

    demo.page.locator("#reset").click()
    demo.expect("status", re.compile("^This is the published model again"))
    demo.expect_answer(7)
    assert demo.steps == 0
    demo.page.reload()
    demo.expect("status", READY)
    demo.draw(ONE_LIKE_SEVEN)
    demo.expect_answer(7)
    assert demo.share("check-after") == published
    demo.page.get_by_role("button", name="Remove this 1").first.click()
    expect(demo.page.locator("#own li")).to_have_count(3)
    assert demo.complaints == []


@pytest.mark.sampled(every=8)
def test_it_pauses_goes_on_and_survives_a_closed_page(demo: Demo) -> None:
    demo.open()
    demo.page.locator("#automatic").uncheck()
    demo.draw(ONE_LIKE_SEVEN)
    demo.label(1)
    demo.expect("status", re.compile("^Kept as a 1"))
    whole = train_and_pause(demo)
    # The model answers while its training waits, and so after the step that was under way.
    demo.draw(FOUR)
    demo.expect_answer(4)
    paused = demo.steps
    demo.page.wait_for_timeout(500)
    assert demo.steps == paused < whole
    demo.page.locator("#pause").click()
    demo.learned(1)
    assert demo.steps == whole

    whole = train_and_pause(demo)
    demo.page.reload()
    demo.learned(1)
    assert demo.steps == whole
    assert demo.complaints == []


def train_and_pause(demo: Demo) -> int:
    """Train and pause before it ends; how many steps there are to be in all. A fast machine may need several tries."""
    for _ in range(10):
        begun = demo.steps
        demo.page.locator("#train").click()
        demo.page.locator("#pause").click(timeout=5000)
        # A pause that came with the last step is none.
        demo.page.wait_for_timeout(200)
        if demo.text("status").startswith("Paused") and demo.steps < begun + 36:
            return begun + 36
        demo.learned(1)
    raise AssertionError("training was over before it could be paused")


@pytest.mark.sampled(every=4)
def test_the_keyboard_alone_is_enough(demo: Demo) -> None:
    demo.open()
    keyboard = demo.page.keyboard
    demo.page.locator("#pad").focus()
    for keys in (["ArrowUp"] * 10, [" "], ["ArrowDown"] * 20, [" "]):
        for key in keys:
            keyboard.press(key)
    demo.expect_answer(1)
    keyboard.press("1")
    demo.learned(1)
    keyboard.press("Escape")
    demo.expect("answer", "Nothing yet: draw a digit.")


def other_weights(bundle: bytes) -> bytes:
    return rewritten(bundle, "weights.safetensors", lambda data: data[:-1] + bytes([data[-1] ^ 1]))


def other_manifest(bundle: bytes) -> bytes:
    return rewritten(bundle, "manifest.json", lambda data: data.replace(b'"name":"digits"', b'"name":"d1gits"'))


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("digits.bundle", other_weights, "DigestError"),
        ("digits.bundle", other_manifest, "SignatureError"),
    ],
)
@pytest.mark.sampled(every=4)
def test_a_bundle_that_was_tampered_with(demo: Demo, name: str, change: Callable[[bytes], bytes], error: str) -> None:
    original = (PAGE_FOLDER / "model" / name).read_bytes()
    data = change(original)
    assert data != original
    demo.page.route(f"**/model/{name}", lambda route: route.fulfill(body=data))
    demo.page.goto(demo.address)
    demo.expect("error", re.compile(f"^{error}: .+"))
    expect(demo.page.get_by_role("alert")).to_be_visible()
    assert demo.page.locator("#train").is_disabled()


@pytest.mark.sampled(every=3)
def test_a_bundle_swapped_together_with_the_key_beside_it(demo: Demo) -> None:
    """Whoever can write the files that the page fetches signs a bundle of their own and puts their key beside it. The
    page knows the publisher's key from when it was built, and looks at no other."""
    model, thief = PAGE_FOLDER / "model", generate_key()
    bundle = (model / "digits.bundle").read_bytes()
    with zipfile.ZipFile(io.BytesIO(bundle)) as file:
        signature = thief.sign(file.read("manifest.json"))
    swapped = {
        "digits.bundle": rewritten(bundle, "manifest.sig", lambda data: signature),
        "publisher.json": json.dumps(
            {**json.loads((model / "publisher.json").read_text()), "key": thief.public_key().public_bytes_raw().hex()}
        ).encode(),
    }
    demo.page.route("**/model/digits.bundle", lambda route: route.fulfill(body=swapped["digits.bundle"]))
    demo.page.route("**/model/publisher.json", lambda route: route.fulfill(body=swapped["publisher.json"]))
    demo.page.goto(demo.address)
    demo.expect("error", re.compile("^SignatureError: .+"))
    assert demo.page.locator("#train").is_disabled()


def rewritten(bundle: bytes, member: str, change: Callable[[bytes], bytes]) -> bytes:
    """The zip file with one member changed and all its checksums right."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(bundle)) as old, zipfile.ZipFile(made, "w") as new:
        for info in old.infolist():
            data = old.read(info)
            new.writestr(info, change(data) if info.filename == member else data)
    return made.getvalue()


def painted(page: Page, canvas: str) -> bool:
    """Whether the canvas has several colours."""
    script = """element => new Set(
        new Uint32Array(element.getContext("2d").getImageData(0, 0, element.width, element.height).data.buffer)).size"""
    return int(page.locator(canvas).evaluate(script)) > 3


@pytest.mark.sampled(every=8)
def test_same_losses_as_python(chromium: Browser, driven: str, tmp_path: Path) -> None:
    """Fifty steps of the same bundle, data and seed; so small that processors' different rounding does not grow."""
    model = PAGE_FOLDER / "model"
    records = np.frombuffer(gzip.decompress((model / "check.bin.gz").read_bytes()), np.uint8).reshape(-1, 785)[:200]
    x = (records[:, 1:].reshape(-1, 1, 28, 28) / np.float32(255)).astype(np.float32)
    y = records[:, 0].astype(np.int64)
    key = json.loads((model / "publisher.json").read_text())["key"]
    runtime = lite.load(model / "digits.bundle", [bytes.fromhex(key)], cache=tmp_path)
    expected = runtime.fit(x, y, epochs=4, batch_size=16, shuffle=True, seed=7, hyperparameters={"lr": 0.01}).losses
    assert len(expected) >= 50
    assert expected[-1] != expected[0]
    job = {
        "bundle": base64.b64encode((model / "digits.bundle").read_bytes()).decode(),
        "key": key,
        "x": base64.b64encode(x.tobytes()).decode(),
        "dims": list(x.shape),
        "y": y.tolist(),
        "fit": {"epochs": 4, "batchSize": 16, "shuffle": True, "seed": 7, "hyperparameters": {"lr": 0.01}},
    }
    with chromium.new_context() as context:
        page = context.new_page()
        page.goto(driven)
        found = page.evaluate("job => window.learn(job)", job)
    assert (found["delegate"], found["isolated"]) == ("wasm", True)
    np.testing.assert_allclose(found["losses"], expected, rtol=1e-4)
    np.testing.assert_allclose(np.reshape(found["logits"], (-1, 10)), runtime.predict(x), rtol=1e-3, atol=1e-3)


@pytest.mark.sampled(every=4)
def test_the_documentation_s_code_runs(chromium: Browser, driven: str) -> None:
    with chromium.new_context() as context:
        page = context.new_page()
        lines: list[str] = []
        page.on("console", lambda line: lines.append(line.text) if line.type == "log" else None)
        page.goto(driven)
        page.evaluate("() => window.snippets().then(() => undefined)")
    losses = [float(re.match(r"step (\d+): loss (.+)", line)[2]) for line in lines[:-1]]  # type: ignore[index]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert lines[-1] == "wasm: 4 steps, answers of shape 32,10"
