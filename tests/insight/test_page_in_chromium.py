"""The standalone page of the demo's CNN in Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from playwright.sync_api import Browser, Page, expect

from archipel.bundle import Bundle
from archipel.insight import Page as InsightPage
from archipel.insight import compare_subjects, measure_times, read_bundle, render
from tests.support.fixtures.chromium import chromium  # noqa: F401


@pytest.fixture(scope="module")
def file(cnn: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    opened = read_bundle(cnn, "cnn.bundle", batch=8, programs=["predict", "train"])
    measure_times(opened.graphs[0], batch=8, runs=3)
    path = tmp_path_factory.mktemp("page") / "cnn.html"
    path.write_text(render(InsightPage(title="cnn", version="0", subjects=[opened.subject])))
    return path


@pytest.fixture
def opened(chromium: Browser, file: Path) -> Iterator[Page]:  # noqa: F811
    with chromium.new_context(offline=True) as context:
        told: list[str] = []
        page = context.new_page()
        page.on("console", lambda message: told.append(message.text))
        page.on("pageerror", lambda error: told.append(str(error)))
        page.goto(f"file://{file}")
        yield page
        assert not told


@pytest.mark.sampled(every=6)
def test_folds_unfolds_and_finds(opened: Page, cnn: Bundle) -> None:
    proto = onnx.load(cnn.program_path("train"), load_external_data=False)
    boxes = opened.locator("svg.graph .box")
    # What predicts comes first: its nodes, one input and one output.
    expect(boxes).to_have_count(len(onnx.load(cnn.program_path("predict")).graph.node) + 2)
    opened.locator("#graph-choice").select_option(label=f"train ({len(proto.graph.node)} nodes)")
    opened.get_by_role("button", name="Fold all", exact=True).click()
    folded = boxes.count()
    scope = opened.locator("svg.graph .box.folded", has_text="loss").first
    words = scope.get_attribute("aria-label")
    assert words == f"scope loss, {sum(node.name.startswith('loss/') for node in proto.graph.node)} nodes"
    scope.focus()
    opened.keyboard.press("Enter")
    frame = opened.locator("svg.graph .frame")
    expect(frame).to_have_attribute("aria-expanded", "true")
    assert boxes.count() > folded
    opened.keyboard.press("Enter")
    expect(frame).to_have_count(0)
    assert boxes.count() == folded

    opened.keyboard.press("/")
    opened.keyboard.type("logsoftmax.vjp/exp")
    expect(opened.locator(".found button")).to_have_count(1)
    opened.keyboard.press("Enter")
    details = opened.get_by_label("Details")
    expect(details.get_by_role("heading", name="Exp")).to_be_visible()
    expect(details).to_contain_text("loss/LogSoftmax.vjp/Exp")


@pytest.mark.sampled(every=4)
def test_each_view_has_its_numbers(opened: Page, cnn: Bundle) -> None:
    views = opened.get_by_role("navigation", name="Views")
    views.get_by_role("link", name="Times").click()
    expect(opened.get_by_role("row", name="Conv").first).to_be_visible()
    expect(opened.get_by_text("inputs are random numbers")).to_be_visible()
    views.get_by_role("link", name="Memory").click()
    # The convolution's and the activation's results: 8 x 4 x 8 x 8 numbers of four bytes, twice.
    expect(opened.get_by_text("16.4 kB").first).to_be_visible()
    expect(opened.locator(".chart canvas")).to_be_visible()
    views.get_by_role("link", name="Weights").click()
    table = opened.get_by_role("table", name="Tensors of cnn.bundle")
    expect(table.get_by_role("row")).to_have_count(len(cnn.tensors) + 1)
    mean = float(cnn.tensors["4.weight"].mean(dtype="float64"))
    expect(table.get_by_role("row", name="4.weight")).to_contain_text(f"{mean:.4g}")


@pytest.mark.sampled(every=4)
def test_nothing_is_wider_than_a_phone(chromium: Browser, file: Path) -> None:  # noqa: F811
    with chromium.new_context(viewport={"width": 360, "height": 740}) as context:
        page = context.new_page()
        for view in ("overview", "graph", "times", "memory", "weights"):
            page.goto(f"file://{file}#{view}")
            page.reload()
            assert page.evaluate("document.documentElement.scrollWidth") <= 360, view


@pytest.mark.sampled(every=4)
def test_arrows_go_along_the_lines(opened: Page) -> None:
    first = opened.locator("svg.graph .box.node").first
    first.focus()
    for operator in ("Relu", "MaxPool", "Reshape", "Gemm"):
        opened.keyboard.press("ArrowDown")
        expect(opened.get_by_label("Details").get_by_role("heading", level=2)).to_have_text(operator)
    opened.keyboard.press("ArrowUp")
    expect(opened.locator("svg.graph .current")).to_contain_text("Reshape")
    assert opened.evaluate("document.activeElement.getAttribute('aria-label')").startswith("Reshape")


@pytest.mark.sampled(every=4)
def test_what_two_models_have_is_side_by_side(chromium: Browser, cnn: Bundle, tmp_path: Path) -> None:  # noqa: F811
    one = read_bundle(cnn, "one", programs=["predict"])
    two = read_bundle(cnn, "two", programs=["predict"])
    page = InsightPage(title="both", version="0", subjects=[one.subject, two.subject])
    page.comparison = compare_subjects(one, two)
    (tmp_path / "both.html").write_text(render(page))
    with chromium.new_context() as context:
        shown = context.new_page()
        shown.goto(f"file://{tmp_path}/both.html")
        expect(shown.get_by_text("The graphs are equal: 5 nodes")).to_be_visible()
        row = shown.get_by_role("row", name="nodes").first
        assert row.locator("td").all_inner_texts() == ["5", "5", "1"]
        expect(shown.get_by_text("the same class for 100.00% of 64 examples")).to_be_visible()
