"""Tuning of a federation's settings with Optuna, rounds as the budget."""

from __future__ import annotations

from archipel.simulation.tuning.result import Trial, Tuning
from archipel.simulation.tuning.settings import Range, TuneSettings, read_tuning
from archipel.simulation.tuning.tune import tune
from archipel.simulation.tuning.written import check_target_file, write_best

__all__ = ["Range", "Trial", "TuneSettings", "Tuning", "check_target_file", "read_tuning", "tune", "write_best"]
