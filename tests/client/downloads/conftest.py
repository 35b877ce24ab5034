"""An enrolled device of a real server, a cache, and weights as rounds store them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from archipel.client import Agent
from archipel.client.downloads.cache import Cache
from archipel.server.database.tables import Blob, Reach
from tests.support.federation import Federation
from tests.support.linear_bundle import POPULATION


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", 1 << 30)


@pytest.fixture
def agent(federation: Federation) -> Agent:
    agent = federation.agent(0)
    agent.run_once()
    agent._transport.traffic.take()
    return agent


@pytest.fixture
def keep(federation: Federation) -> Callable[[bytes], str]:
    """Store weights on the server as a round's are; their digest."""

    def store(data: bytes) -> str:
        services = federation.server._services
        digest = str(services.blobs.put(data))
        with services.database.write() as session:
            session.merge(Blob(digest=digest, kind="weights", size=len(data), created=time.time()))
            session.merge(Reach(digest=digest, population=POPULATION, reason="model"))
        return digest

    return store
