from __future__ import annotations

import sys
from pathlib import Path

from tests.support.fixtures.gradient_cases import gradient_cases  # noqa: F401

TESTS = Path(__file__).resolve().parent.parent
# The gradient cases and the zoo's tasks are those of their own rooms.
sys.path[:0] = [str(TESTS / room) for room in ("operators", "models")]
