"""The documentation is built strictly, and its pages work in Chromium from the folder and from a server, where their
policy stops nothing."""

# ruff: noqa: F401, F811 (fixtures are imported and then arguments)
from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect
from werkzeug.serving import make_server

from archipel.bundle import generate_key
from archipel.server import init_data_folder, load_settings
from archipel.server.app import create_app
from archipel.server.services import Services
from tests.api.test_public_names import PUBLIC
from tests.support.fixtures.chromium import chromium
from tests.support.pages import ROOT

pytestmark = pytest.mark.slow
PICTURED = ("dashboard.html", "insight.html")
PAGES = ("index.html", "design.html", "reference/autodiff.html", "tutorials/pytorch-on-devices.html", "results.html")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` builds it, with no way to the network."""
    folder = tmp_path_factory.mktemp("site")
    nowhere = {f"{scheme}_proxy": "http://127.0.0.1:9" for scheme in ("http", "https")}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder], cwd=ROOT,
        env=os.environ | nowhere | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server") / "data"
    key = generate_key().public_key().public_bytes_raw()
    init_data_folder(folder, enrolment_key=key, publisher_keys=[key])
    settings = load_settings(folder, docs=True)
    services = Services.open(settings)
    services.prepare()
    services.database.dispose()
    app = create_app(settings, docs_page=site)
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.port}/docs/"
    server.shutdown()
    thread.join()
    server.server_close()
    app.extensions["archipel"].database.dispose()


class Reader:
    """A page, and everything that it asked for and complained about."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on(
            "console", lambda line: self.complaints.append(line.text) if line.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def search(self, words: str) -> None:
        self.page.locator("input.md-search__input").fill(words)
        expect(self.page.locator(".md-search-result__item").first).to_be_visible(timeout=30_000)

    def colour(self) -> str:
        return str(self.page.evaluate("getComputedStyle(document.body).backgroundColor"))


@pytest.fixture
def reader(chromium: Browser) -> Iterator[Reader]:
    with chromium.new_context(color_scheme="light") as context:
        yield Reader(context.new_page())


def use(reader: Reader, start: str) -> None:
    """What a reader does: opens pages, searches, follows a result, and chooses the dark scheme, which stays."""
    for name in PAGES:
        reader.page.goto(start + name)
        expect(reader.page.locator("h1")).to_be_visible(timeout=30_000)
    for name in PICTURED:
        reader.page.goto(start + name)
        widths = reader.page.eval_on_selector_all("main img", "all => all.map(each => each.naturalWidth)")
        assert widths, name
        assert min(widths) > 0, f"{name} has a picture that is not shown"
    reader.page.goto(start + "index.html")
    reader.search("least_multiplier")
    reader.page.locator(".md-search-result__link").first.click()
    expect(reader.page).to_have_url(re.compile(r"(privacy|federate-with-privacy)\.html"), timeout=30_000)
    reader.page.wait_for_load_state()
    light = reader.colour()
    reader.page.locator("label[for=__palette_1]").click()
    reader.page.wait_for_function("was => getComputedStyle(document.body).backgroundColor !== was", arg=light)
    reader.page.goto(start + "design.html")
    assert reader.colour() != light
    assert reader.page.locator("svg.drawn").count() == 4


def test_under_a_server_nothing_is_stopped_and_nothing_is_asked_elsewhere(reader: Reader, address: str) -> None:
    use(reader, address)
    assert reader.complaints == []
    assert [url for url in reader.requests if not url.startswith((address, "data:"))] == []


def test_from_the_folder_everything_works_as_well(reader: Reader, site: Path) -> None:
    use(reader, f"{site.as_uri()}/")
    assert reader.complaints == []
    assert [url for url in reader.requests if not url.startswith((site.as_uri(), "data:", "about:"))] == []


def test_a_script_that_is_not_of_the_site_does_not_run(reader: Reader, address: str, site: Path) -> None:
    page = site / "index.html"
    whole = page.read_text()
    page.write_text(whole.replace("</body>", "<script>document.title = 'changed'</script></body>"))
    try:
        reader.page.goto(address)
        assert "Content Security Policy" in " ".join(reader.complaints)
        assert reader.page.title() != "changed"
    finally:
        page.write_text(whole)


def test_on_a_phone_no_page_is_wider_than_the_screen(reader: Reader, address: str) -> None:
    reader.page.set_viewport_size({"width": 390, "height": 844})
    for name in PAGES:
        reader.page.goto(address + name)
        assert reader.page.evaluate("document.documentElement.scrollWidth") <= 390, name


def test_every_public_name_has_its_entry_in_the_built_page(site: Path) -> None:
    for room, names in PUBLIC.items():
        text = (site / "reference" / f"{room.partition('.')[2] or room}.html").read_text()
        shown = set(re.findall(r'<h2 id="([\w.]+)" class="doc doc-heading">', text))
        linked = set(re.findall(r'<a href="#([\w.]+)"><code>', text))
        assert len(linked) == len(names.split()), room
        assert linked <= shown, room


def test_the_site_is_small_and_complete(site: Path) -> None:
    files = [path for path in site.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 20_000_000
    assert {path.suffix for path in files} <= {".html", ".js", ".json", ".css", ".svg", ".png", ".webp", ".txt", ".inv"}
    assert not (site / "404.html").exists()
    for path in site.rglob("*.html"):
        assert not re.search(r'(src|href)="https?://[^"]*\.(js|css|woff2?)"', path.read_text()), path
