from __future__ import annotations

from tests.support.fixtures.commands import archipel  # noqa: F401
