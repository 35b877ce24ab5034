"""Links between the pages lead somewhere, and the paths that they name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.pages import ROOT

PAGES = [
    "README.md",
    "SECURITY.md",
    "CONTRIBUTING.md",
    *(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md")),
]
GENERATED = {"docs/api.md", "docs/operators.md", "docs/results-compression.md"}
WRITTEN = [page for page in PAGES if page not in GENERATED]
BUILT = {"archipel/server/http/demo_page/", "archipel/server/http/docs_page/"}
"""What `make web` and `make docs` make."""


def text_of(page: Path) -> str:
    """The page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", text_of(page), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(ROOT / page)):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (ROOT / page).parent / name if name else ROOT / page
        if file.resolve().parent == ROOT / "docs" / "reference":
            continue  # pages that the site's build writes, which checks these links itself
        assert file.exists(), (page, target)
        assert not anchor or anchor in anchors(file), (page, target)


@pytest.mark.parametrize("page", WRITTEN)
def test_paths_of_the_package_are_there(page: str) -> None:
    found = re.findall(r"`((?:archipel|tests|benchmarks|scripts|docker|examples)/[\w./-]+)`", text_of(ROOT / page))
    real = [path for path in found if path not in BUILT and not re.search("NAME|ROOM", path)]
    assert [path for path in real if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_lines_are_short(page: str) -> None:
    """But tables' and code's, which cannot be broken."""
    long = [line for line in text_of(ROOT / page).splitlines() if len(line) > 120 and not line.startswith("|")]
    assert long == []
