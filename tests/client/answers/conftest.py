"""An agent and a server that answers as it is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.answers.world import World
from tests.support.scripted_server import scripted


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with scripted(tmp_path) as server:
        made = World(tmp_path, server)
        yield made
        made.agent.close()
