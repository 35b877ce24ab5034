from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent
# The gradient cases and the zoo's tasks are those of their own rooms.
sys.path[:0] = [str(TESTS / room) for room in ("operators", "autodiff", "models")]


@pytest.fixture(scope="session")
def gradient_cases() -> dict:
    """(domain, operator) -> hypothesis strategy of Case."""
    found: dict = {}
    for path in sorted((TESTS / "autodiff" / "gradient_cases").glob("*.py")):
        found.update(getattr(importlib.import_module(f"gradient_cases.{path.stem}"), "CASES", {}))
    return found
