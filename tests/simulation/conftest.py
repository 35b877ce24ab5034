from __future__ import annotations

from tests.support.fixtures.strategies import make  # noqa: F401
