from __future__ import annotations

from tests.support.fixtures.gradient_cases import gradient_cases  # noqa: F401
