"""Federated algorithms: one file each, server half and device half together."""

from archipel.strategies.registry import STRATEGIES, get
from archipel.strategies.strategy import Strategy

__all__ = ["STRATEGIES", "Strategy", "get", "step_bound"]


def step_bound(manifest, hyperparameters, cohort):  # type: ignore  # replaced on merging
    return max(p.clip for q in manifest.programs.values() for p in q.outputs if getattr(p, "kind", "") == "delta")
