"""What tests share is in tests/support: a conftest.py only makes fixtures of it, and nothing imports from one.

A file that runs the tests of others in another place (`from tests.room.test_file import *`) loses none of them.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

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


@pytest.mark.sampled(every=4)
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


def starred(text: str) -> list[str]:
    """The modules all of whose names a file imports."""
    imports = [node for node in ast.parse(text).body if isinstance(node, ast.ImportFrom)]
    return [node.module or "" for node in imports if any(alias.name == "*" for alias in node.names)]


def replaced(texts: Iterable[str]) -> list[str]:
    """Tests and fixtures that more than one of the files defines, so that only the last one's are found."""
    definitions = [node for text in texts for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    names = Counter(
        node.name
        for node in definitions
        if node.name.startswith("test_") or any("fixture" in ast.unparse(mark) for mark in node.decorator_list)
    )
    return sorted(name for name, count in names.items() if count > 1)


@pytest.mark.sampled(every=4)
def test_tests_that_run_in_two_places_do_not_replace_each_other() -> None:
    for path in TESTS.rglob("test_*.py"):
        modules = starred(path.read_text())
        files = [TESTS.parent.joinpath(*module.split(".")).with_suffix(".py") for module in modules]
        assert not replaced(file.read_text() for file in files), path


def test_what_would_be_replaced() -> None:
    assert starred("from tests.a import *\nfrom tests.b import c") == ["tests.a"]
    first, second = "def test_a(): ...\ndef helper(): ...", "def helper(): ...\ndef test_a(): ..."
    assert replaced([first, second]) == ["test_a"]
    fixture = "@pytest.fixture(scope='module')\ndef made(): ..."
    assert replaced([fixture, fixture]) == ["made"]
