"""What `make docs` does beside MkDocs: brings in pages from outside docs/, draws pictures into pages, and writes down
which scripts the pages contain, so that a server can allow these and no others.
"""

from __future__ import annotations

import base64
import hashlib
import html
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
import links
import reference

ROOT = Path(__file__).resolve().parents[2]
HASHES = "script-hashes.txt"
"""The file of the built site with a line for each script inside its pages: its SHA-256, as policies name it."""
LEFT_OUT = ("404.html", "sitemap.xml", "sitemap.xml.gz", "assets/javascripts/lunr", "**/*.map", "assets/images")
"""What MkDocs writes and this site does not use: it has no address of its own, and one language."""
_SCRIPT = re.compile(r"<script(?P<attributes>[^>]*)>(?P<code>.*?)</script>", re.S)
_PICTURE = re.compile(r'<img alt="(?P<alt>[^"]*)" src="(?P<source>[^"]+\.svg)"\s*/?>')
_hashes: set[str] = set()


def on_config(config: Any) -> Any:
    """Put the pages of the Python API into the navigation, in place of `reference/`."""
    pages = [{name.removeprefix("reference/").removesuffix(".md"): name} for name in reference.pages()]
    pages[0] = "reference/index.md"
    config.nav = _replaced(config.nav, "reference/", pages)
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the Python API, and the repository's files that are not in docs/."""
    for name, text in reference.pages().items():
        files.append(File.generated(config, name, content=text))
    for source, shown in links.BESIDE.items():
        if source != "README.md":
            files.append(File.generated(config, shown, abs_src_path=str(ROOT / source)))
    for picture in sorted(ROOT.glob("examples/*/results/*.*")):
        if links.place_of(name := picture.relative_to(ROOT).as_posix()):
            files.append(File.generated(config, name, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Make the repository's links those of the site."""
    return links.resite(markdown, page.file.src_uri)


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Write drawn pictures into the page itself, so that they take the colours of its light or dark scheme."""

    def drawn(found: re.Match[str]) -> str:
        source = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.dest_uri), found["source"]))
        text = (ROOT / "docs" / source).read_text(encoding="utf-8")
        if 'class="drawn"' not in text:
            return found[0]
        text = re.sub(r"<style>.*?</style>\s*", "", text[text.index("<svg") :], flags=re.S)
        return text.replace("<svg ", f'<svg role="img" aria-label="{found["alt"]}" ', 1)

    return _PICTURE.sub(drawn, content)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Note the scripts that a page contains; raise ValueError for a style in an attribute, which no policy allows."""
    for found in _SCRIPT.finditer(output):
        if "src=" not in found["attributes"] and "application/json" not in found["attributes"]:
            digest = hashlib.sha256(found["code"].encode()).digest()
            _hashes.add(f"sha256-{base64.b64encode(digest).decode()}")
    styled = re.search(r"<[^>]* style=[^>]*>|<style\b", output)
    if styled:
        raise ValueError(f"{page.file.src_uri}: {html.unescape(styled[0])[:200]} has a style; give it a class instead")
    return output


def on_post_build(config: Any) -> None:
    """Write down the scripts, and take out what the site does not use."""
    folder = Path(config.site_dir)
    (folder / HASHES).write_text("".join(f"{each}\n" for each in sorted(_hashes)), encoding="ascii")
    for pattern in LEFT_OUT:
        for path in sorted(folder.glob(pattern), reverse=True):
            for file in (*path.rglob("*"), path) if path.is_dir() else (path,):
                if file.is_file():
                    file.unlink()


def _replaced(nav: list[Any], name: str, pages: list[Any]) -> list[Any]:
    """The navigation with `pages` in place of the entry that leads to `name`."""
    changed = []
    for entry in nav:
        if isinstance(entry, dict):
            [(title, inside)] = entry.items()
            inside = pages if inside == name else _replaced(inside, name, pages) if isinstance(inside, list) else inside
            entry = {title: inside}
        changed.append(entry)
    return changed
