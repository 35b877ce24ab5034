"""Training with PyTorch, for data that may be collected in one place. PyTorch is imported when a fit begins."""

from __future__ import annotations

from archipel.training.cloud.augment import in_turn, random_flip, random_scale, random_shift
from archipel.training.cloud.fit import fit
from archipel.training.cloud.loop import Epoch, FitResult
from archipel.training.cloud.one_cycle import fit_one_cycle

__all__ = ["Epoch", "FitResult", "fit", "fit_one_cycle", "in_turn", "random_flip", "random_scale", "random_shift"]
