"""No property test can fail because the machine is busy: none has a deadline for one example."""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis

TESTS = Path(__file__).resolve().parent.parent
PROFILE = "tests/conftest.py"
SOURCES = {path.relative_to(TESTS.parent).as_posix(): path.read_text() for path in sorted(TESTS.rglob("*.py"))}
USING = {name: ast.parse(text) for name, text in SOURCES.items() if "hypothesis" in text or "schemathesis" in text}


def called(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Every call with the last part of its function's name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield getattr(node.func, "attr", getattr(node.func, "id", "")), node


def timed(tree: ast.AST) -> list[int]:
    """Lines that give settings a deadline or a profile of their own, or that settings are taken over from elsewhere."""
    return [
        call.lineno
        for name, call in called(tree)
        if name in ("register_profile", "load_profile", "get_profile")
        or (name == "settings" and any(word.arg in (None, "deadline", "parent") for word in call.keywords))
        or (name == "settings" and call.args)
    ]


def test_the_profile_without_a_deadline_is_in_force() -> None:
    assert hypothesis.settings.default is not None
    assert hypothesis.settings.default.deadline is None
    assert hypothesis.settings(max_examples=3).deadline is None


def test_a_slow_example_passes() -> None:
    """Hypothesis itself, with what `@given` alone gives: one example that takes longer than its default of 200 ms."""

    @hypothesis.settings(max_examples=1, phases=[hypothesis.Phase.generate], database=None)
    @hypothesis.given(hypothesis.strategies.just(0.25))
    def slow(seconds: float) -> None:
        time.sleep(seconds)

    slow()


def test_no_file_sets_another() -> None:
    found = {name: lines for name, tree in USING.items() if name != PROFILE and (lines := timed(tree))}
    assert not found, f"leave deadline and profile to {PROFILE}"


def test_what_would_be_found() -> None:
    assert timed(ast.parse("@settings(max_examples=9, deadline=200)\ndef test(): pass")) == [1]
    assert timed(ast.parse("x = hypothesis.settings(deadline=None)")) == [1]
    assert timed(ast.parse("settings.load_profile('default')")) == [1]
    assert timed(ast.parse("settings(**more)")) == [1]
    assert not timed(ast.parse("@settings(max_examples=9)\ndef test(): pass"))
    assert len(USING) > 20
