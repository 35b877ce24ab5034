"""Which way of training a model on several devices is fastest: costs of its graph, a cluster, and a search."""

from __future__ import annotations

from archipel.training.cloud.planner.cluster import Cluster, read_cluster, write_cluster
from archipel.training.cloud.planner.plan import Alternative, Plan, plan

__all__ = ["Alternative", "Cluster", "Plan", "plan", "read_cluster", "write_cluster"]
