"""People log in at the dashboard in Chromium, by a certified provider of identities in a process of its own."""

# ruff: noqa: F401, F811 (fixtures are imported and then arguments)
from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.fixtures.chromium import chromium, needed
from tests.support.fixtures.server import data_folder, keys
from tests.support.serving import Server
from tests.support.world import DataFolder

WEB = Path(__file__).parents[4] / "web"
PEOPLE = {"olga": ["everybody", "ml"], "paul": ["everybody"]}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def provider(redirect: str, secret: str) -> Iterator[str]:
    """The provider's URL."""
    if shutil.which("node") is None or not (WEB / "node_modules" / "oidc-provider").is_dir():
        needed("needs Node.js and web/node_modules; `make web` installs both")
    port = free_port()
    command = ["node", str(WEB / "tests" / "openid_provider.mjs"), str(port), redirect, secret, json.dumps(PEOPLE)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate()


def log_in(page: Page, url: str, name: str) -> None:
    page.goto(f"{url}/dashboard/tasks")
    page.get_by_role("link", name="Log in with 127.0.0.1").click()
    page.locator("input[name=login]").fill(name)
    page.locator("input[name=password]").fill("x")
    page.locator("button[type=submit]").click()
    page.get_by_role("button", name="Continue").click()


@pytest.mark.sampled(every=6)
def test_who_has_a_group_gets_in_and_who_has_none_does_not(
    chromium: Browser, data_folder: DataFolder, tmp_path: Path
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    secret = tmp_path / "openid.secret"
    secret.write_text("between these two")
    server = Server(Path(data_folder[0]))
    with provider(f"{url}/dashboard/login/openid/callback", secret.read_text()) as issuer:
        server.start(
            port, openid_issuer=issuer, openid_client_id="archipel", openid_address=url,
            openid_secret_file=str(secret), openid_operators="ml,others",
        )  # fmt: skip
        try:
            olga, paul = chromium.new_context().new_page(), chromium.new_context().new_page()
            log_in(olga, url, "olga")
            expect(olga).to_have_url(f"{url}/dashboard/tasks")
            expect(olga.locator(".person")).to_contain_text("operator")
            log_in(paul, url, "paul")
            expect(paul.get_by_role("alert")).to_contain_text("nothing in your claim 'groups' has a role")
            paul.goto(f"{url}/dashboard/tasks")
            expect(paul.get_by_role("heading", name="Log in")).to_be_visible()
            cookies = {each["name"]: each for each in olga.context.cookies(url)}
            assert cookies["archipel-local"]["sameSite"] == "Strict"
            assert cookies["archipel-local"]["httpOnly"]
            assert "archipel-local-login" not in cookies
        finally:
            server.stop()
