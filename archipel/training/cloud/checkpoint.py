"""The checkpoint of a fit: one file, whole or not at all, from which a killed fit goes on as if nothing had been.

It holds tensors, numbers and strings only and is read with PyTorch's unpickler for these ("weights_only").
"""

from __future__ import annotations

import io
import pickle
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archipel.durable import write_durably
from archipel.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import nn

FORMAT = "archipel cloud fit 1"

# What PyTorch's unpickler raises for bytes that are none of its own.
UNREADABLE = (
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    pickle.UnpicklingError,
)


@dataclass
class Progress:
    """What has been found so far: the facts of every epoch, in order, and the weights of the best."""

    best_weights: dict[str, torch.Tensor]
    history: list[dict[str, Any]] = field(default_factory=list)


def write_checkpoint(
    path: Path,
    made_with: Mapping[str, Any],
    progress: Progress,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
) -> None:
    """Replace the file. Raises CheckpointError if it cannot be written."""
    import torch

    buffer = io.BytesIO()
    content = {
        "format": FORMAT,
        "made_with": dict(made_with),
        "history": progress.history,
        "best_weights": progress.best_weights,
        "module": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "generator": generator.get_state(),
        # Dropout draws from PyTorch's own generator.
        "dropout": torch.get_rng_state(),
    }
    torch.save(content, buffer)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, buffer.getvalue())
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise CheckpointError(f"cannot write the checkpoint {path}: {reason}; choose another folder") from error


def read_checkpoint(
    path: Path,
    made_with: Mapping[str, Any],
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
) -> Progress:
    """Put module, optimizer and generators where the file left them.

    Raises CheckpointError if the file cannot be read or belongs to another fit.
    """
    import torch

    remedy = "delete it to begin again, or name another file"
    if not zipfile.is_zipfile(path):
        raise CheckpointError(f"{path} is not a checkpoint of a cloud fit (no zip file); {remedy}")
    try:
        content = torch.load(path, map_location=next(module.parameters()).device, weights_only=True)
    except UNREADABLE as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"the checkpoint {path} cannot be read ({reason}); {remedy}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of a cloud fit ({FORMAT!r}); {remedy}")
    there = content["made_with"]
    for name in sorted({*made_with, *there}):
        if made_with.get(name) != there.get(name):
            raise CheckpointError(
                f"the checkpoint {path} is of another fit: {name} was {there.get(name)} there, "
                f"is {made_with.get(name)} here; {remedy}"
            )
    try:
        module.load_state_dict(content["module"])
        optimizer.load_state_dict(content["optimizer"])
        generator.set_state(content["generator"].cpu())
        torch.set_rng_state(content["dropout"].cpu())
        return Progress(content["best_weights"], list(content["history"]))
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointError(f"the checkpoint {path} is damaged ({error}); {remedy}") from error


def crc(data: bytes) -> int:
    return zlib.crc32(data)
