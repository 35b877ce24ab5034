"""SECURITY.md names a test for every promise, and every attack stands behind one."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def test_the_tests_that_it_names_are_there() -> None:
    named = re.findall(r"`((?:web/)?tests/[^`*]+)`", PAGE)
    assert len(named) > 30
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_attack_is_named() -> None:
    attacks = {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "attacks").rglob("test_*.py")}
    assert len(attacks) > 20
    assert sorted(path for path in attacks if path not in PAGE) == []


def test_the_scripts_behind_its_figures_are_there() -> None:
    named = re.findall(r"`python (benchmarks/[^` ]+)", PAGE)
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []
