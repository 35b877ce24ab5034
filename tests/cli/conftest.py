from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import Linear, make_linear
from tests.support.fixtures.commands import archipel  # noqa: F401


@pytest.fixture
def linear(tmp_path: Path) -> Linear:
    return make_linear(tmp_path)
