"""What tests share is in tests/support: a conftest.py only makes fixtures of it, and nothing imports from one."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent


def imported(text: str) -> set[str]:
    """Names of the modules that a file imports from."""
    nodes = list(ast.walk(ast.parse(text)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    from_modules = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    names |= {node.module or "" for node in from_modules}
    return names | {f"{node.module or ''}.{alias.name}" for node in from_modules for alias in node.names}


def borrowed(text: str) -> list[str]:
    return sorted(name for name in imported(text) if "conftest" in name.split("."))


def test_nothing_imports_from_a_conftest() -> None:
    found = {path.relative_to(TESTS).as_posix(): borrowed(path.read_text()) for path in TESTS.rglob("*.py")}
    assert not {name: names for name, names in found.items() if names}, "put what is shared into tests/support"


def test_what_would_be_found() -> None:
    assert borrowed("from tests.server.conftest import World") == [
        "tests.server.conftest",
        "tests.server.conftest.World",
    ]
    assert borrowed("import tests.server.conftest as made")
    assert borrowed("from tests.server import conftest")
    assert borrowed("def test():\n    from .conftest import World")
    assert not borrowed("from tests.support.world import World")
