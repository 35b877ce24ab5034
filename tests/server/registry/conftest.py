from __future__ import annotations

from tests.support.fixtures.fleet import fleet  # noqa: F401
