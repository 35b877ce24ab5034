"""Evaluations of simulated devices, each on examples of its own that it does not train with."""

from __future__ import annotations

from archipel.simulation.evaluation.held_out import hold_out_each
from archipel.simulation.evaluation.measuring import DeviceTests, has_own_tensors
from archipel.simulation.evaluation.settings import Evaluation

__all__ = ["DeviceTests", "Evaluation", "has_own_tensors", "hold_out_each"]
