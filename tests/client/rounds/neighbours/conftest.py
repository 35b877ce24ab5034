"""An agent, and a server of rounds over neighbours that answers as it is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.rounds.neighbours.world import NeighbourWorld, opened


@pytest.fixture(params=["malicious", "semi-honest"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NeighbourWorld]:
    with opened(tmp_path, request.param) as made:
        yield made
