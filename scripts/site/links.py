"""Where links between the repository's Markdown files lead on the site.

On GitHub a link is relative to a file of the repository. The site has docs/ as its root, and beside its pages some
files from outside of it. Links to code have nowhere to lead to on the site, and become plain text.
"""

from __future__ import annotations

import posixpath
import re

BESIDE = {
    "SECURITY.md": "SECURITY.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "examples/activity/README.md": "examples/activity/README.md",
    "examples/vision/README.md": "examples/vision/README.md",
    "examples/physics/README.md": "examples/physics/README.md",
    "README.md": "index.md",
}
"""Files of the repository outside of docs/ that the site shows, and where. The site's own front page is in place of
the README."""
_FENCED = re.compile(r"(^```.*?^```$)", re.M | re.S)
_LINK = re.compile(r"(?P<picture>!?)\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<target>[^)\s]+)\)")


def source_of(page: str) -> str:
    """The repository's file behind a page of the site."""
    outside = {shown: source for source, shown in BESIDE.items() if source != "README.md"}
    return outside.get(page, f"docs/{page}")


def place_of(file: str) -> str | None:
    """Where the site has a file of the repository, or None where it has not."""
    if file in BESIDE:
        return BESIDE[file]
    if file.startswith("docs/"):
        return file.removeprefix("docs/")
    return file if re.fullmatch(r"examples/\w+/results/[\w.-]+\.(png|svg)", file) else None


def resite(text: str, page: str) -> str:
    """The Markdown of a page with its links as the site needs them.

    Arguments:
        text: as it is in the repository.
        page: its path on the site.
    """
    folder = posixpath.dirname(source_of(page))

    def changed(found: re.Match[str]) -> str:
        name, _, anchor = found["target"].partition("#")
        if not name or re.match(r"\w+:", name):
            return found[0]
        place = place_of(posixpath.normpath(posixpath.join(folder, name)))
        if place is None:
            return found["text"]
        link = posixpath.relpath(place, posixpath.dirname(page) or ".")
        return f"{found['picture']}[{found['text']}]({link}{'#' if anchor else ''}{anchor})"

    parts = _FENCED.split(text)
    return "".join(part if part.startswith("```") else _LINK.sub(changed, part) for part in parts)
