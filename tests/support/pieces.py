"""Weights of many tensors, and what a device receives of them."""

from __future__ import annotations

import numpy as np

from archipel.client import Agent

LIMIT = 64 << 20


def model(head: int = 0, backbone: int = 0) -> dict[str, np.ndarray]:
    """2 MB in 20 tensors, and a head of 2.6 kB."""
    rng, own = np.random.default_rng(backbone), np.random.default_rng(head)
    made = {f"backbone{n}": rng.standard_normal((100, 256)).astype(np.float32) for n in range(20)}
    return {**made, "head": own.standard_normal((64, 10)).astype(np.float32)}


def received(agent: Agent) -> int:
    assert agent._transport is not None
    traffic = agent._transport.traffic.take()
    return int(traffic.received + traffic.headers_received + traffic.sent + traffic.headers_sent)
