"""What "auto" chooses where WebGPU is there, on the processor: the only WebGPU that a machine without a GPU has."""

# ruff: noqa: F401, F811 (fixtures are imported and then arguments)
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser

from tests.support.fixtures.chromium import launch
from tests.support.fixtures.npm_package import (
    MODEL,
    Site,
    archive,
    job,
    numbers,
    project,
    serve,
    vite_page,
)

# A page on a machine whose driver says that it is a GPU.
IN_DISGUISE = """
    const info = { vendor: "nvidia", architecture: "hopper", device: "", description: "", isFallbackAdapter: false };
    Object.defineProperty(GPUAdapter.prototype, "info", { get: () => info });
"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    yield from launch("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan")


Learn = Callable[..., tuple[dict[str, Any], list[str]]]


@pytest.fixture
def learn(chromium: Browser, vite_page: Path, serve: Callable[[Path], Site]) -> Learn:
    """(options, a script before the page's) -> what the page found, and the addresses that it asked for."""
    site = serve(vite_page.parent)

    def ask(options: dict[str, Any], script: str = "") -> tuple[dict[str, Any], list[str]]:
        with chromium.new_context() as context:
            context.add_init_script(script)
            asked: list[str] = []
            context.on("request", lambda request: asked.append(request.url))
            opened = context.new_page()
            opened.goto(f"{site.address}{vite_page.name}/")
            found = opened.evaluate("job => window.learn(job)", {**job(), "options": options})
        np.testing.assert_allclose(found["losses"], numbers()["losses"], rtol=1e-3)
        return found, asked

    return ask


@pytest.mark.sampled(every=8)
def test_software_is_no_gpu(learn: Learn) -> None:
    found, asked = learn({})
    assert found["delegate"] == "wasm"
    assert "its adapter is software" in found["delegateReason"]
    assert "swiftshader" in found["delegateReason"]
    assert not [url for url in asked if "jspi" in url or "webgpu" in url]


@pytest.mark.slow
def test_where_it_is_asked_for_it_works(learn: Learn) -> None:
    found, _ = learn({"delegate": "webgpu"})
    assert (found["delegate"], found["delegateReason"]) == ("webgpu", "asked for")


@pytest.mark.slow
def test_what_is_slower_is_not_taken(learn: Learn) -> None:
    found, _ = learn({"worker": False}, IN_DISGUISE)
    assert found["delegate"] == "wasm", found["delegateReason"]
    words = found["delegateReason"].split()
    assert words[:4] + words[5:8] == ["a", "training", "step", "takes", "ms", "on", "WebGPU,"]
    assert float(words[4]) > float(words[8]) > 0
