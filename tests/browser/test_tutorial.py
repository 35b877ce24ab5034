"""The tutorial of a page that joins a federation: its blocks run, and Chromium does what the reader does by hand."""

# ruff: noqa: F401, F811 (fixtures are imported and then arguments)
from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from archipel.server.http.pages import PAGE_FOLDER
from tests.support.fixtures.chromium import chromium, needed
from tests.support.fixtures.demo_page import FOUR, TWO, Demo
from tests.support.fixtures.shell import shell
from tests.support.running_pages import run_page


@pytest.mark.slow
def test_a_browser_joins(chromium: Browser, tmp_path: Path, shell: dict[str, str]) -> None:
    if not (PAGE_FOLDER / "index.html").is_file():
        needed("needs the demo page; `make web` builds it")
    with chromium.new_context() as context:
        demo = Demo(context.new_page(), "http://127.0.0.1:8472/demo/")

        @contextmanager
        def joined() -> Iterator[None]:
            demo.open()
            for shape, digit in ((TWO, 2), (FOUR, 4)):
                demo.draw(shape)
                demo.label(digit)
            demo.page.locator("#token").set_input_files(tmp_path / "page.token")
            demo.page.locator("#join").click()
            demo.expect("federation", "Joined. Waiting for a round.")
            yield
            demo.expect("federation", re.compile("Your masked update was in a round."))

        printed = run_page("docs/tutorials/browser-joins.md", tmp_path, shell, meanwhile={"task watch": joined})
    assert re.search(r"  committed +3 +3 ", printed)
    assert demo.complaints == []
