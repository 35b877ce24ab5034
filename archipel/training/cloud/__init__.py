"""Training with PyTorch, for data that may be collected in one place. PyTorch is imported when a training begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from archipel.errors import MissingExtraError
from archipel.training.cloud.augment import in_turn, random_flip, random_scale, random_shift
from archipel.training.cloud.callbacks.callback import Callback
from archipel.training.cloud.config import TrainConfig
from archipel.training.cloud.preprocess import with_preprocessing
from archipel.training.cloud.result import Epoch, TrainResult
from archipel.training.cloud.train import prepare, train
from archipel.training.cloud.trainer import Trainer

if TYPE_CHECKING:
    from archipel.training.cloud.torch_module import TorchModule

__all__ = [
    "Callback",
    "Epoch",
    "TorchModule",
    "TrainConfig",
    "TrainResult",
    "Trainer",
    "in_turn",
    "prepare",
    "random_flip",
    "random_scale",
    "random_shift",
    "train",
    "with_preprocessing",
]


def __getattr__(name: str) -> object:
    # A class of PyTorch's: whoever does without PyTorch can import the rest.
    if name != "TorchModule":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from archipel.training.cloud.torch_module import TorchModule
    except ImportError as error:
        raise MissingExtraError("torch", "cloud") from error
    return TorchModule
