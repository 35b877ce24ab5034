"""The documentation at /docs/: its files with their policy, and nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
from flask.testing import FlaskClient

from archipel.server.app import create_app
from archipel.server.http import documentation
from tests.support.world import World

SCRIPT = "__md_scope=new URL('.',location)"
HASH = "sha256-" + base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
FILES = {
    "index.html": (f"<!doctype html><script>{SCRIPT}</script>".encode(), "text/html; charset=utf-8"),
    "reference/index.html": (b"<!doctype html>", "text/html; charset=utf-8"),
    "assets/main.css": (b"a{}", "text/css; charset=utf-8"),
    "search/search_index.json": (b"{}", "application/json"),
    "results/curve.png": (b"\x89PNG", "image/png"),
    "pictures/task.webp": (b"RIFF", "image/webp"),
}


@pytest.fixture
def server_settings() -> Mapping[str, object]:
    return {"docs": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "docs_page"
    for name, (data, _) in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    (root / documentation.HASHES).write_text(f"{HASH}\n")
    (tmp_path / "secret.txt").write_text("for nobody")
    return root


@pytest.fixture
def client(world: World, folder: Path) -> Iterator[FlaskClient]:
    app = create_app(world.settings, docs_page=folder)
    yield app.test_client()
    app.extensions["archipel"].database.dispose()


def policy_of(client: FlaskClient) -> dict[str, str]:
    with client.get("/docs/") as response:
        return dict(rule.split(" ", 1) for rule in response.headers["Content-Security-Policy"].split("; "))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.sampled(every=6)
def test_every_file_with_its_type_and_its_policy(client: FlaskClient, name: str) -> None:
    data, kind = FILES[name]
    with client.get(f"/docs/{name}") as response:
        assert (response.status_code, response.get_data()) == (200, data)
        assert response.headers["Content-Type"] == kind
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert response.headers["Referrer-Policy"] == "no-referrer"


def test_the_policy_allows_the_scripts_of_the_pages_and_no_other(client: FlaskClient) -> None:
    rules = policy_of(client)
    assert rules.pop("script-src") == f"'self' '{HASH}'"
    assert rules.pop("img-src") == "'self' data:"
    assert {rules.pop(name) for name in ("worker-src", "connect-src", "style-src")} == {"'self'"}
    assert set(rules.values()) == {"'none'"}
    assert set(rules) == {"default-src", "base-uri", "form-action", "frame-ancestors"}


@pytest.mark.parametrize(
    "line",
    [
        "'unsafe-inline'",
        "*",
        "https://elsewhere.example",
        "sha256-short=",
        f"{HASH}';object-src",
        "sha256-" + "é" * 43 + "=",
    ],
)
@pytest.mark.sampled(every=6)
def test_a_list_of_scripts_cannot_allow_anything_else(client: FlaskClient, folder: Path, line: str) -> None:
    (folder / documentation.HASHES).write_text(f"{line}\n{HASH}\n", encoding="utf-8")
    assert policy_of(client)["script-src"] == f"'self' '{HASH}'"


def test_a_long_list_does_not_make_a_long_policy(client: FlaskClient, folder: Path) -> None:
    lines = (base64.b64encode(hashlib.sha256(bytes([number])).digest()).decode() for number in range(200))
    (folder / documentation.HASHES).write_text("".join(f"sha256-{line}\n" for line in lines))
    assert policy_of(client)["script-src"].count("sha256-") == documentation.MOST_HASHES


def test_a_folder_is_its_page(client: FlaskClient) -> None:
    for path in ("/docs/", "/docs/reference/"):
        with client.get(path) as response:
            assert response.status_code == 200
            assert b"<!doctype html>" in response.get_data()
    with client.get("/docs") as response:
        assert response.status_code == 308


@pytest.mark.parametrize("name", ["../secret.txt", "..%2fsecret.txt", "reference", "nothing.html", "/etc/passwd"])
@pytest.mark.sampled(every=6)
def test_nothing_but_the_files_of_the_folder(client: FlaskClient, name: str) -> None:
    with client.get(f"/docs/{name}", follow_redirects=True) as response:
        assert response.status_code == 404
        assert b"for nobody" not in response.get_data()


@pytest.mark.sampled(every=3)
def test_documentation_that_was_not_built(world: World, tmp_path: Path) -> None:
    app = create_app(world.settings, docs_page=tmp_path / "nothing")
    client = app.test_client()
    for path in ("/docs/", "/docs/index.html"):
        detail = client.get(path).get_json()["detail"]
        assert "pip install archipel-docs" in detail
        assert "make docs" in detail
    assert "/docs/" not in client.get("/").text
    app.extensions["archipel"].database.dispose()


def test_a_server_shows_it_only_if_it_is_told_to(world: World, folder: Path) -> None:
    app = create_app(msgspec.structs.replace(world.settings, docs=False), docs_page=folder)
    client = app.test_client()
    answer = client.get("/docs/")
    assert (answer.status_code, "--docs" in answer.get_json()["detail"]) == (404, True)
    assert "/docs/" not in client.get("/").text
    app.extensions["archipel"].database.dispose()


def test_the_front_page_leads_there(client: FlaskClient) -> None:
    assert "/docs/" in re.findall(r'href="([^"]+)"', client.get("/").text)


def test_the_server_itself_serves_the_package_s_folder() -> None:
    assert Path(documentation.__file__).parent / "docs_page" == documentation.DOCS_FOLDER
