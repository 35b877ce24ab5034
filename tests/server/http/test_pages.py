"""The browser demo at /demo/: types, caching, isolation, and nothing outside its folder."""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from flask.testing import FlaskClient

from archipel.server.app import create_app
from archipel.server.http import pages
from archipel.server.http.request_limits import DOWNLOADS_OF_ONE_ADDRESS
from archipel.server.settings import DEMO_DOWNLOADS
from tests.support.world import World

FILES = {
    "index.html": (b"<!doctype html>", "text/html; charset=utf-8"),
    "icon.svg": (b"<svg/>", "image/svg+xml; charset=utf-8"),
    "assets/index-BdY3x_9a.js": (b"export {}", "text/javascript; charset=utf-8"),
    "assets/worker-C0ffee12.mjs": (b"export {}", "text/javascript; charset=utf-8"),
    "assets/index-1a2b3c4d.css": (b"a{}", "text/css; charset=utf-8"),
    "assets/ort-wasm-DEADBEEF.wasm": (b"\0asm\1\0\0\0", "application/wasm"),
    "model/digits.bundle": (b"PK", "application/octet-stream"),
    "model/publisher.json": (b"{}", "application/json"),
}


@pytest.fixture
def server_settings() -> Mapping[str, object]:
    return {"demo": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "demo_page"
    for name, (data, _) in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    (tmp_path / "secret.txt").write_text("for nobody")
    (root / "link.txt").symlink_to(tmp_path / "secret.txt")
    return root


@pytest.fixture
def client(world: World, folder: Path) -> Iterator[FlaskClient]:
    app = create_app(world.settings, demo_page=folder)
    yield app.test_client()
    app.extensions["archipel"].database.dispose()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.sampled(every=6)
def test_every_file_with_its_type_and_its_headers(client: FlaskClient, name: str) -> None:
    data, kind = FILES[name]
    with client.get(f"/demo/{name}") as response:
        assert response.status_code == 200
        assert response.get_data() == data
        assert response.headers["Content-Type"] == kind
        assert response.headers["Content-Length"] == str(len(data))
        assert response.headers["ETag"] == f'"{hashlib.sha256(data).hexdigest()}"'
        cached = "public, max-age=31536000, immutable" if name.startswith("assets/") else "no-cache"
        assert response.headers["Cache-Control"] == cached
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert response.headers["Cross-Origin-Opener-Policy"] == "same-origin"
        assert response.headers["Cross-Origin-Embedder-Policy"] == "require-corp"
        rules = dict(rule.split(" ", 1) for rule in response.headers["Content-Security-Policy"].split("; "))
        assert rules["default-src"] == "'none'"
        assert rules["script-src"] == "'self' 'wasm-unsafe-eval'"
        assert rules["connect-src"] == rules["worker-src"] == rules["style-src"] == "'self'"
        allowed = {source for rule in rules.values() for source in rule.split()}
        assert allowed == {"'self'", "'none'", "'wasm-unsafe-eval'"}


def test_the_folder_itself_is_the_page(client: FlaskClient) -> None:
    with client.get("/demo/") as response:
        assert response.get_data() == FILES["index.html"][0]
    with client.get("/demo") as response:
        assert response.status_code == 308
        assert response.headers["Location"].endswith("/demo/")
    with client.head("/demo/") as response:
        assert (response.status_code, response.get_data()) == (200, b"")


@pytest.mark.sampled(every=3)
def test_what_the_browser_has_is_not_sent_again(client: FlaskClient, folder: Path) -> None:
    with client.get("/demo/") as first:
        etag = first.headers["ETag"]
    with client.get("/demo/", headers={"If-None-Match": etag}) as again:
        assert (again.status_code, again.get_data()) == (304, b"")
        assert again.headers["Cache-Control"] == "no-cache"
    (folder / "index.html").write_bytes(b"<!doctype html><title>built again</title>")
    with client.get("/demo/", headers={"If-None-Match": etag}) as changed:
        assert changed.status_code == 200
        assert b"built again" in changed.get_data()


def test_a_compressed_file_stands_for_itself(client: FlaskClient, folder: Path) -> None:
    name = "assets/ort-wasm-DEADBEEF.wasm"
    data, kind = FILES[name]
    (folder / name).unlink()
    (folder / f"{name}.gz").write_bytes(gzip.compress(data))
    etags = set()
    for accepted, encoding in (("gzip, br", "gzip"), ("br", None), ("gzip;q=0", None)):
        with client.get(f"/demo/{name}", headers={"Accept-Encoding": accepted}) as response:
            assert response.headers["Content-Length"] == str(len(response.get_data()))
            assert response.headers["Content-Type"] == kind
            assert response.headers.get("Content-Encoding") == encoding
            assert response.headers["Vary"] == "Accept-Encoding"
            sent = response.get_data()
            assert (gzip.decompress(sent) if encoding else sent) == data
            etags.add(response.headers["ETag"])
    assert len(etags) == 2


@pytest.mark.parametrize(
    "name",
    [
        "../secret.txt", "..%2fsecret.txt", "%2e%2e/secret.txt", "assets/../../secret.txt", "..%5csecret.txt",
        "%2fetc/passwd", "/etc/passwd", "link.txt", "assets", "assets/", ".", "..", "index.html/", "index.html%00",
        "model/../index.html", "INDEX.HTML",
    ],
)  # fmt: skip
@pytest.mark.sampled(every=6)
def test_nothing_but_the_files_of_the_folder(client: FlaskClient, name: str) -> None:
    with client.get(f"/demo/{name}", follow_redirects=True) as response:
        assert b"for nobody" not in response.get_data()
        assert response.status_code == 404
        assert response.get_json()["status"] == 404


def test_a_page_that_was_not_built(world: World, tmp_path: Path) -> None:
    app = create_app(world.settings, demo_page=tmp_path / "nothing")
    for path in ("/demo/", "/demo/index.html", "/demo/model/digits.bundle"):
        with app.test_client().get(path) as response:
            assert response.status_code == 404
            assert response.get_json()["status"] == 404
            assert "make web" in response.get_json()["detail"]
    app.extensions["archipel"].database.dispose()


def test_the_server_itself_serves_the_package_s_folder() -> None:
    assert Path(pages.__file__).parent / "demo_page" == pages.PAGE_FOLDER


def test_a_server_shows_the_demo_only_if_it_is_told_to(world: World, folder: Path) -> None:
    app = create_app(msgspec.structs.replace(world.settings, demo=False), demo_page=folder)
    client = app.test_client()
    for path in ("/demo/", "/demo/index.html"):
        answer = client.get(path)
        assert answer.status_code == 404
        assert "--demo" in answer.get_json()["detail"]
    assert "/demo/" not in client.get("/").text
    app.extensions["archipel"].database.dispose()


@pytest.mark.sampled(every=3)
def test_only_reading(client: FlaskClient) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        with client.open("/demo/", method=method) as response:
            assert response.status_code == 405


@pytest.mark.sampled(every=3)
def test_six_browsers_behind_one_address_load_the_page(client: FlaskClient, world: World) -> None:
    """All at once, with as many connections as browsers open; and they use up no enrolment."""
    with ExitStack() as stack:
        for _ in range(6 * 6):
            response = stack.enter_context(client.get("/demo/assets/ort-wasm-DEADBEEF.wasm"))
            assert response.status_code == 200
        assert client.get("/v1/health").status_code == 200


@pytest.mark.sampled(every=3)
def test_who_asks_for_more_is_told_when_to_ask_again(client: FlaskClient) -> None:
    with ExitStack() as stack:
        answers = [stack.enter_context(client.get("/demo/")) for _ in range(DOWNLOADS_OF_ONE_ADDRESS + 1)]
        assert [answer.status_code for answer in answers] == [*[200] * DOWNLOADS_OF_ONE_ADDRESS, 429]
        assert int(answers[-1].headers["Retry-After"]) >= 1
        others = [
            stack.enter_context(client.get("/demo/", environ_base={"REMOTE_ADDR": f"10.0.0.{number}"}))
            for number in range(DEMO_DOWNLOADS - DOWNLOADS_OF_ONE_ADDRESS + 1)
        ]
        assert [answer.status_code for answer in others] == [*[200] * (DEMO_DOWNLOADS - DOWNLOADS_OF_ONE_ADDRESS), 503]
        assert int(others[-1].headers["Retry-After"]) >= 1
    with client.get("/demo/") as again:
        assert again.status_code == 200


def test_the_front_page_says_what_is_here(client: FlaskClient, folder: Path) -> None:
    def links() -> list[str]:
        response = client.get("/")
        assert (response.status_code, response.mimetype) == (200, "text/html")
        assert response.headers["Content-Security-Policy"] == pages.CONTENT_SECURITY_POLICY
        return re.findall(r'href="([^"]+)"', response.text)

    assert links() == ["/dashboard/", "/api/", "/v1/openapi.json", "/v1/health", "/demo/"]
    for link in links():
        # The dashboard's first page leads to its login.
        with client.get(link, follow_redirects=True) as response:
            assert response.status_code == 200
    (folder / "index.html").unlink()
    assert links() == ["/dashboard/", "/api/", "/v1/openapi.json", "/v1/health"]
