from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


@pytest.fixture(scope="session")
def gradient_cases() -> dict:
    """(domain, operator) -> hypothesis strategy of Case, gathered from the files in gradient_cases/."""
    found: dict = {}
    for path in sorted((HERE / "gradient_cases").glob("*.py")):
        module = importlib.import_module(f"gradient_cases.{path.stem}")
        found.update(getattr(module, "CASES", {}))
    return found
