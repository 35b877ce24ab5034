"""Training with PyTorch, for data that may be collected in one place. PyTorch is imported when a training begins."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from archipel.errors import MissingExtraError
from archipel.training.cloud.augment import random_flip, random_scale, random_shift
from archipel.training.cloud.callbacks.callback import Callback
from archipel.training.cloud.config import TrainConfig
from archipel.training.cloud.preprocess import with_preprocessing
from archipel.training.cloud.result import Epoch, TrainResult
from archipel.training.cloud.train import prepare, train
from archipel.training.cloud.trainer import Trainer

if TYPE_CHECKING:
    from archipel.training.cloud.graphs.torch_module import TorchModule
    from archipel.training.cloud.programs.cohort import Cohort, CohortUpdate

__all__ = [
    "Callback",
    "Cohort",
    "CohortUpdate",
    "Epoch",
    "TorchModule",
    "TrainConfig",
    "TrainResult",
    "Trainer",
    "prepare",
    "random_flip",
    "random_scale",
    "random_shift",
    "train",
    "with_preprocessing",
]


# Classes whose files import PyTorch: whoever does without it can import the rest.
_OF_TORCH = {"Cohort": "programs.cohort", "CohortUpdate": "programs.cohort", "TorchModule": "graphs.torch_module"}


def __getattr__(name: str) -> object:
    if name not in _OF_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found: object = getattr(import_module(f"{__name__}.{_OF_TORCH[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtraError("torch", "cloud") from error
    return found
