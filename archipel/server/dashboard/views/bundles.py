"""Bundles that the server has: a list, one bundle, and the upload of another."""

from __future__ import annotations

from flask import Response

from archipel.errors import NotFoundError, RefusalError
from archipel.server.dashboard import rendering
from archipel.server.dashboard.bundle_files import look_into
from archipel.server.dashboard.desk import Desk
from archipel.server.dashboard.pages import ROOT, Page, go_to
from archipel.server.http.api.bundles import store_bundle
from archipel.server.http.problems import api_error


def list_bundles(desk: Desk) -> str:
    """Bundles, newest first."""
    page = desk.ask("list_bundles", query={"after": desk.query.get("after")})
    return rendering.render("bundles.html", desk, page=page, uploads=desk.may("publish_bundle"))


def show_bundle(desk: Desk, digest: str) -> str:
    """One bundle, and what can be made of it."""
    found = desk.ask("list_bundles", query={"starts": digest, "limit": 1}).items
    if not found:
        raise NotFoundError(f"no bundle {digest}")
    models = desk.ask("list_models", query={"limit": 50}).items if desk.may("register_version", "list_models") else ()
    return rendering.render(
        "bundle.html", desk, bundle=found[0], content=look_into(desk, digest), models=models,
        creates=desk.may("create_task"), makes=desk.may("create_model"),
        told="The bundle is on the server." if desk.query.get("done") == "upload" else "",
    )  # fmt: skip


def ask_for_file(desk: Desk) -> str:
    """The form."""
    return _form(desk)


def take_file(desk: Desk) -> Response:
    """Store the file as the API does, and show the bundle."""
    assert desk.file is not None
    try:
        bundle, _ = store_bundle(desk.call("publish_bundle"), desk.file, None)
    except RefusalError as error:
        refused = Response(_form(desk, str(error)), mimetype="text/html")
        refused.status_code = api_error(error).status
        return refused
    return go_to(f"{ROOT}/bundles/{bundle.digest}?done=upload")


def _form(desk: Desk, wrong: str = "") -> str:
    return rendering.render("upload.html", desk, wrong=wrong, most=desk.services.settings.max_bundle_bytes)


PAGES = (
    Page("GET", f"{ROOT}/bundles", list_bundles, ("list_bundles",)),
    Page("GET", f"{ROOT}/bundles/upload", ask_for_file, ("publish_bundle",)),
    Page("POST", f"{ROOT}/bundles/upload", take_file, ("publish_bundle",), receives=True),
    Page("GET", f"{ROOT}/bundles/<digest:digest>", show_bundle, ("list_bundles", "download_bundle")),
)
