from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parents[3] / "autodiff"
sys.path.insert(0, str(CASES))


@pytest.fixture(scope="session")
def gradient_cases() -> dict:
    """(domain, operator) -> hypothesis strategy of Case: those of the contract that gradient rules keep."""
    found: dict = {}
    for path in sorted((CASES / "gradient_cases").glob("*.py")):
        module = importlib.import_module(f"gradient_cases.{path.stem}")
        found.update(getattr(module, "CASES", {}))
    return found
