"""The pages for people: a front page at / with links, the API at /api/, the browser demo's files at /demo/, and the
documentation's at /docs/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from flask import Response

from archipel import __version__
from archipel.server.http.api_page import render
from archipel.server.http.documentation import DOCS_FOLDER, documentation_routes, is_shown
from archipel.server.http.openapi import document
from archipel.server.http.page_files import INDEX, PageFiles
from archipel.server.http.problems import refuse
from archipel.server.http.routes import PUBLIC, Call, Route
from archipel.server.http.sending import in_time, parts_of

PAGE_FOLDER = Path(__file__).with_name("demo_page")
# The page may load and compile files of this server only, and connect to no other.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self' 'wasm-unsafe-eval'",
        "worker-src 'self'",
        "connect-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Browsers share memory between WebAssembly threads only on pages that are isolated from other origins.
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_HERE = """<!doctype html>
<html lang="en">
<title>archipel</title>
<h1>archipel</h1>
<p>This is a federation server. It is run with the command <code>archipel</code>.</p>
<ul>
{items}
</ul>
</html>
"""
_ITEM = '<li><a href="{path}">{path}</a>: {what}</li>'
_ITEMS = {
    "/dashboard/": "the dashboard",
    "/api/": "its API",
    "/v1/openapi.json": "the same as OpenAPI 3.1",
    "/v1/health": "whether it works",
}
_DEMO = {"/demo/": "the browser demo"}
_DOCS = {"/docs/": "the documentation"}


def routes(
    folder: Path = PAGE_FOLDER,
    *,
    resources: Mapping[str, Sequence[Route]],
    demo: bool = True,
    docs: bool = False,
    docs_folder: Path = DOCS_FOLDER,
    stall_seconds: float = 30.0,
) -> tuple[Route, ...]:
    """The pages' lines of the route table.

    Arguments:
        resources: The API that is described at /api/.
        folder: Where the demo was built.
        demo: Whether it is shown.
        docs: Whether the documentation is shown.
        docs_folder: Where the documentation was built.
        stall_seconds: In this time a reader must take `sending.PART_BYTES`.
    """
    files = PageFiles(folder, stall_seconds=stall_seconds)

    def front_page(call: Call[None]) -> Response:
        """What there is, for people."""
        documented = _DOCS if is_shown(docs_folder, shown=docs) else {}
        shown = {**_ITEMS, **documented, **(_DEMO if demo and files.built else {})}
        items = "\n".join(_ITEM.format(path=path, what=what) for path, what in shown.items())
        return Response(
            _HERE.format(items=items), headers={**HEADERS, "Cache-Control": "no-cache"}, mimetype="text/html"
        )

    @cache
    def rendered() -> tuple[str, str]:
        return render(document(resources, version=__version__))

    def api_page(call: Call[None]) -> Response:
        """The API's description, for people."""
        page, policy = rendered()
        data = page.encode()
        headers = {**HEADERS, "Content-Security-Policy": policy, "Cache-Control": "no-cache"}
        response = Response(in_time(parts_of(data), stall_seconds), headers=headers, mimetype="text/html")
        response.content_length = len(data)
        return response

    def demo_page(call: Call[None]) -> Response:
        """The browser demo; nothing that is drawn there is sent anywhere."""
        return send(INDEX)

    def demo_file(call: Call[None], name: str) -> Response:
        """A file of the browser demo."""
        return send(name)

    def send(name: str) -> Response:
        if not demo:
            raise refuse(404, "this server does not show the demo page; `archipel serve start FOLDER --demo` does")
        if not files.built:
            raise refuse(
                404,
                "this server has no demo page; `pip install archipel-web-page` installs it, and in archipel's source "
                "folder `make web` builds it",
            )
        file = files.find(name)
        if file is None:
            raise refuse(404, f"the demo page has no file {name[:100]!r}")
        response = files.send(file)
        response.headers.update(HEADERS)
        return response

    return (
        Route("GET", "/", PUBLIC, front_page),
        Route("GET", "/api/", PUBLIC, api_page, download=True),
        Route("GET", "/demo/", PUBLIC, demo_page, download=demo),
        Route("GET", "/demo/<path:name>", PUBLIC, demo_file, download=demo),
        *documentation_routes(docs_folder, shown=docs, stall_seconds=stall_seconds),
    )
