"""The pages for people: a front page at / with links, and the built files of the browser demo at /demo/."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
from pathlib import Path, PurePosixPath
from typing import IO

from flask import Response, request, send_file

from archipel.server.http.problems import refuse
from archipel.server.http.routes import PUBLIC, Call, Route

PAGE_FOLDER = Path(__file__).with_name("demo_page")
INDEX = "index.html"
COMPRESSED = ".gz"
"""NAME.gz is served as NAME: as it is to clients that accept gzip, and unpacked to others."""
YEAR_SECONDS = 365 * 24 * 3600

# Not from the tables of the operating system, which differ: with nosniff a wrong type leaves the page empty.
CONTENT_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".css": "text/css",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".wasm": "application/wasm",
    ".txt": "text/plain",
}
OTHER_TYPE = "application/octet-stream"

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
HASHED = re.compile(r"assets/.+-[0-9A-Za-z_-]{8}\.\w+")
"""Names with eight characters of a digest, which Vite writes into them: the content of such a file never changes."""

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
_ITEMS = {"/v1/openapi.json": "its API, as OpenAPI 3.1", "/v1/health": "whether it works"}
_DEMO = {"/demo/": "the browser demo"}


class Pages:
    """The files of one folder. A name from a request is looked up among them, and is never made part of a path."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._etags: dict[tuple[str, int, int], str] = {}

    def files(self) -> dict[str, Path]:
        """Every plain file by its name in URLs, without links. Empty if the page was not built."""
        paths = {}
        for parent, _, names in os.walk(self._folder):
            for name in names:
                path = Path(parent, name)
                # A link could lead out of the folder, to any file of this machine.
                if not path.is_symlink() and path.is_file():
                    paths[path.relative_to(self._folder).as_posix()] = path
        return paths

    def etag(self, path: Path) -> str:
        """SHA-256 of the content, remembered until size or time of the file change."""
        stat = path.stat()
        key = (str(path), stat.st_mtime_ns, stat.st_size)
        if key not in self._etags:
            with path.open("rb") as file:
                self._etags[key] = hashlib.file_digest(file, "sha256").hexdigest()
        return self._etags[key]


def routes(folder: Path = PAGE_FOLDER) -> tuple[Route, ...]:
    """The pages' lines of the route table, for the demo built in `folder`."""
    pages = Pages(folder)

    def front_page(call: Call[None]) -> Response:
        """What there is, for people."""
        shown = {**_ITEMS, **(_DEMO if INDEX in pages.files() else {})}
        items = "\n".join(_ITEM.format(path=path, what=what) for path, what in shown.items())
        return Response(
            _HERE.format(items=items), headers={**HEADERS, "Cache-Control": "no-cache"}, mimetype="text/html"
        )

    def demo_page(call: Call[None]) -> Response:
        """The browser demo; nothing that is drawn there is sent anywhere."""
        return _send(pages, INDEX)

    def demo_file(call: Call[None], name: str) -> Response:
        """A file of the browser demo."""
        return _send(pages, name)

    return (
        Route("GET", "/", PUBLIC, front_page),
        Route("GET", "/demo/", PUBLIC, demo_page),
        Route("GET", "/demo/<path:name>", PUBLIC, demo_file),
    )


def _send(pages: Pages, name: str) -> Response:
    files = pages.files()
    if INDEX not in files:
        raise refuse(404, "the demo page was not built; `make web` in archipel's source folder builds it")
    packed = name not in files
    path = files.get(name + COMPRESSED if packed else name)
    if path is None:
        raise refuse(404, f"the demo page has no file {name[:100]!r}")
    unpack = packed and not request.accept_encodings["gzip"]
    source: Path | IO[bytes] = path
    if unpack:
        # Not gzip.open: gunicorn sends from the file descriptor, which would be the packed bytes.
        source = io.BytesIO(gzip.decompress(path.read_bytes()))
    response = send_file(
        source,
        mimetype=CONTENT_TYPES.get(PurePosixPath(name).suffix, OTHER_TYPE),
        # Two representations of one file must not have the same ETag, or a cache would mix them up.
        etag=f"{pages.etag(path)}-plain" if unpack else pages.etag(path),
        conditional=not unpack,
        last_modified=None,
    )
    if packed and not unpack:
        response.headers["Content-Encoding"] = "gzip"
    response.headers["Vary"] = "Accept-Encoding"
    fixed = HASHED.fullmatch(name) is not None
    response.headers["Cache-Control"] = f"public, max-age={YEAR_SECONDS}, immutable" if fixed else "no-cache"
    response.headers.update(HEADERS)
    return response
