from __future__ import annotations

from tests.support.fixtures.commands import archipel  # noqa: F401
from tests.support.fixtures.postgresql import cluster  # noqa: F401
