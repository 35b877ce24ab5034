"""Federated algorithms: one file each, server half and device half together."""

from archipel.strategies.registry import STRATEGIES, get
from archipel.strategies.strategy import Strategy

__all__ = ["STRATEGIES", "Strategy", "get"]
