"""The documentation site at /docs/, if it is installed and the server shows it."""

from __future__ import annotations

import re
from pathlib import Path

from flask import Response

from archipel.server.http.page_files import INDEX, PageFile, PageFiles
from archipel.server.http.problems import refuse
from archipel.server.http.routes import PUBLIC, Call, Route

DOCS_FOLDER = Path(__file__).with_name("docs_page")
HASHES = "script-hashes.txt"
"""A file of the site with a line for each script that is written into its pages (scripts/site/hooks.py)."""
MOST_HASHES = 64
_HASH = re.compile(r"sha256-[A-Za-z0-9+/]{43}=")


def policy(files: PageFiles) -> str:
    """The Content-Security-Policy of the site: its own files, the few scripts inside its pages, and the pictures that
    its style sheets contain.

    Lines of the list that are no SHA-256 are left out, so that the list can allow scripts and nothing else.
    """
    listed = files.find(HASHES)
    lines = [] if listed is None else _text(listed).split()[:MOST_HASHES]
    scripts = " ".join(["'self'", *(f"'{line}'" for line in lines if _HASH.fullmatch(line))])
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {scripts}",
            "worker-src 'self'",
            "connect-src 'self'",
            "style-src 'self'",
            "img-src 'self' data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


def documentation_routes(folder: Path, *, shown: bool, stall_seconds: float) -> tuple[Route, ...]:
    """The site's lines of the route table.

    Arguments:
        folder: Where the site was built.
        shown: Whether this server shows it.
        stall_seconds: In this time a reader must take `sending.PART_BYTES`.
    """
    files = PageFiles(folder, stall_seconds=stall_seconds)

    def docs_page(call: Call[None]) -> Response:
        """The documentation."""
        return send(INDEX)

    def docs_file(call: Call[None], name: str) -> Response:
        """A file of the documentation."""
        return send(name)

    def send(name: str) -> Response:
        if not shown:
            raise refuse(404, "this server does not show the documentation; `archipel serve start FOLDER --docs` does")
        if not files.built:
            raise refuse(
                404,
                "this server has no documentation; `pip install archipel-docs` installs it, and in archipel's source "
                "folder `make docs` builds it",
            )
        # Pages link to folders' pages by their names, and people type the folder.
        file = files.find(f"{name}{INDEX}" if name.endswith("/") else name)
        if file is None:
            raise refuse(404, f"the documentation has no page {name[:100]!r}; /docs/ has a list and a search")
        response = files.send(file)
        response.headers.update({
            "Content-Security-Policy": policy(files),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
        })  # fmt: skip
        return response

    return (
        Route("GET", "/docs/", PUBLIC, docs_page, download=shown),
        Route("GET", "/docs/<path:name>", PUBLIC, docs_file, download=shown),
    )


def is_shown(folder: Path, *, shown: bool) -> bool:
    """Whether /docs/ has pages."""
    return shown and PageFiles(folder, stall_seconds=1.0).built


def _text(file: PageFile) -> str:
    return file.path.read_text(encoding="ascii", errors="replace")
