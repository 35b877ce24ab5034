"""Writes the pictures of docs/dashboard.md: pages of a server in this process, with devices of the tests.

    python scripts/dashboard_pictures.py [FOLDER]

It needs Chromium and Pillow. Every page is taken at the sizes of a desktop and of a phone, in light and dark, into
FOLDER; without one only the pictures that the page shows are written, into docs/pictures/.
"""

from __future__ import annotations

import io
import itertools
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page

from tests.support.busy_server import fill_server
from tests.support.database import migrated_database
from tests.support.devices import Keys
from tests.support.fixtures.chromium import launch
from tests.support.fixtures.dashboard import SIZES, Scheme, Size, served_world, tab
from tests.support.fixtures.insight import publish
from tests.support.fleet import Fleet
from tests.support.real_graphs import sign_cnn
from tests.support.tiny_bundle import make_bundle
from tests.support.world import World, close_world, open_world, temporary_folder

ROOT = Path(__file__).resolve().parents[1]
SHOWN: tuple[tuple[str, Size, Scheme], ...] = (
    ("overview", "desktop", "light"), ("task", "desktop", "light"), ("model", "desktop", "dark"),
    ("task", "phone", "dark"), ("graph", "desktop", "light"),
)  # fmt: skip
ROUNDS = 8


def main(arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory() as temporary, temporary_folder(keys := Keys()) as (folder, token, _):
        database = Path(temporary) / "archipel.db"
        database.write_bytes(migrated_database())
        world = open_world(folder, token, keys, make_bundle(Path(temporary), keys.publisher), database)
        paths = {
            "login": "/dashboard/login",
            **fill_server(world, ROUNDS),
            "graph": add_network(world, Path(temporary)),
        }
        every = list(itertools.product(paths, SIZES, ("light", "dark")))
        target = Path(arguments[0]) if arguments else ROOT / "docs/pictures"
        target.mkdir(parents=True, exist_ok=True)
        chosen = every if arguments else SHOWN
        browsers = launch("--disable-gpu")
        browser = next(browsers)
        with served_world(world) as address:
            for size, scheme in itertools.product(SIZES, ("light", "dark")):
                names = [name for name, *of in chosen if of == [size, scheme]]
                with tab(browser, address, size, scheme) as at:  # type: ignore[arg-type]
                    if "login" in names:
                        at.open(paths["login"])
                        save(at.page.screenshot(), target / f"login-{size}-{scheme}.webp")
                    at.log_in(token)
                    for name in names:
                        if name != "login":
                            page = at.open(paths[name])
                            if name == "graph":
                                choose_node(page)
                            picture = at.page.screenshot(full_page=bool(arguments))
                            save(picture, target / f"{name}-{size}-{scheme}.webp")
        next(browsers, None)
        close_world(world)


def add_network(world: World, folder: Path) -> str:
    """A model with a network whose inside is worth a look; the path of that page."""
    # In a population of its own, or trainings of the other one would be offered to it.
    digest = publish(world, sign_cnn(folder, world.keys.publisher, "letters"), "writers")
    fleet = Fleet(world)
    fleet.post("models", {"name": "letters", "population": "writers"}, 201)
    fleet.post("models/letters/versions", {"bundle": digest}, 201)
    return "/dashboard/models/letters/versions/1/insight"


def choose_node(page: Page) -> None:
    """Wait until the server has read the model, and choose its first convolution."""
    page.locator("svg.graph .box").first.wait_for(timeout=60_000)
    predict = page.locator("#graph-choice option", has_text="predict").text_content()
    page.locator("#graph-choice").select_option(label=predict)
    page.locator("svg.graph .box", has_text="Conv").first.click()


def save(picture: bytes, path: Path) -> None:
    """As WebP, which is a fifth of the size of the browser's own PNG."""
    Image.open(io.BytesIO(picture)).convert("RGB").save(path, "WEBP", quality=82, method=6)


if __name__ == "__main__":
    main(sys.argv[1:])
