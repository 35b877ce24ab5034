"""An enrolled device of a real server, a cache, and weights as rounds store them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipel.client.downloads.cache import Cache
from archipel.server.database.tables import Blob, Reach
from tests.client.conftest import POPULATION

LIMIT = 64 << 20


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", 1 << 30)


@pytest.fixture
def agent(federation: Any) -> Any:
    agent = federation.agent(0)
    agent.run_once()
    agent._transport.traffic.take()
    return agent


@pytest.fixture
def keep(federation: Any) -> Callable[[bytes], str]:
    """Store weights on the server as a round's are; their digest."""

    def store(data: bytes) -> str:
        services = federation.server._services
        digest = str(services.blobs.put(data))
        with services.database.write() as session:
            session.merge(Blob(digest=digest, kind="weights", size=len(data), created=time.time()))
            session.merge(Reach(digest=digest, population=POPULATION, reason="model"))
        return digest

    return store


def model(head: int = 0, backbone: int = 0) -> dict[str, np.ndarray]:
    """2 MB in 20 tensors, and a head of 2.6 kB."""
    rng, own = np.random.default_rng(backbone), np.random.default_rng(head)
    made = {f"backbone{n}": rng.standard_normal((100, 256)).astype(np.float32) for n in range(20)}
    return {**made, "head": own.standard_normal((64, 10)).astype(np.float32)}


def received(agent: Any) -> int:
    traffic = agent._transport.traffic.take()
    return int(traffic.received + traffic.headers_received + traffic.sent + traffic.headers_sent)
