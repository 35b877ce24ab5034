"""The PyTorch engine: training where the data may be collected. PyTorch is imported when a fit begins."""

from __future__ import annotations

from archipel.training.cloud.augment import random_shift
from archipel.training.cloud.fit import Epoch, FitResult, fit

__all__ = ["Epoch", "FitResult", "fit", "random_shift"]
