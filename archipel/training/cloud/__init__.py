"""Training with PyTorch, for data that may be collected in one place. PyTorch is imported when a fit begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from archipel.errors import MissingExtraError
from archipel.training.cloud.augment import in_turn, random_flip, random_scale, random_shift
from archipel.training.cloud.fit import fit
from archipel.training.cloud.loop import Epoch, FitResult
from archipel.training.cloud.one_cycle import fit_one_cycle

if TYPE_CHECKING:
    from archipel.training.cloud.torch_module import TorchModule

__all__ = [
    "Epoch",
    "FitResult",
    "TorchModule",
    "fit",
    "fit_one_cycle",
    "in_turn",
    "random_flip",
    "random_scale",
    "random_shift",
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
