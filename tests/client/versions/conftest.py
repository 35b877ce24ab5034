"""A registry of linear models on a real server, and devices that run what it offers."""

from __future__ import annotations

import pytest

from tests.support.federation import Federation
from tests.support.registry import FIRST, Registry


@pytest.fixture
def registry(federation: Federation) -> Registry:
    """Version 1 is promoted."""
    made = Registry(federation, {})
    made.add(FIRST)
    return made
