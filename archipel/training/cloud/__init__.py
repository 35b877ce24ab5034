"""Training with PyTorch, for data that may be collected in one place. PyTorch is imported when a training begins."""

from __future__ import annotations

from archipel.training.cloud.augment import in_turn, random_flip, random_scale, random_shift
from archipel.training.cloud.callbacks import Callback
from archipel.training.cloud.config import TrainConfig
from archipel.training.cloud.result import Epoch, TrainResult
from archipel.training.cloud.train import prepare, train
from archipel.training.cloud.trainer import Trainer

__all__ = [
    "Callback",
    "Epoch",
    "TrainConfig",
    "TrainResult",
    "Trainer",
    "in_turn",
    "prepare",
    "random_flip",
    "random_scale",
    "random_shift",
    "train",
]
