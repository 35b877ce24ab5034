from __future__ import annotations

from typing import Any

import pytest

from tests.server.registry.fleet import Fleet


@pytest.fixture
def fleet(world: Any) -> Fleet:
    """Model "digits" with two versions, the first of them promoted."""
    return Fleet(world).create()
