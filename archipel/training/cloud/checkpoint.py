"""The checkpoint of a fit: one file, from which a killed fit continues to the results of one that was not killed.

A write replaces the file as a whole or not at all. The file holds tensors, numbers and strings only, and is read with
PyTorch's unpickler for these ("weights_only"), since a general one would run code from the file.
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

# The errors that PyTorch's unpickler raises for damaged bytes.
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
    """The results so far: `history` has the fields of every Epoch, in order; `best_weights` are the best epoch's."""

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
        # Dropout draws from PyTorch's global generator, which must continue where it stopped.
        "dropout": torch.get_rng_state(),
    }
    torch.save(content, buffer)  # in memory, so that the file is replaced by complete bytes
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
    """Restore module, optimizer and generators from the file, and return the results so far.

    Raises CheckpointError if the file cannot be read or belongs to another fit.
    """
    import torch

    remedy = "delete it to begin again, or name another file"
    # Before `torch.load`, which would try an older format for a file that is no zip.
    if not zipfile.is_zipfile(path):
        raise CheckpointError(f"{path} is not a checkpoint of a cloud fit (no zip file); {remedy}")
    try:
        content = torch.load(path, map_location=next(module.parameters()).device, weights_only=True)
    except UNREADABLE as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"the checkpoint {path} cannot be read ({reason}); {remedy}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of a cloud fit ({FORMAT!r}); {remedy}")
    # Before any state is restored: the checkpoint of another fit must leave the module unchanged.
    written_with = content["made_with"]
    for name in sorted({*made_with, *written_with}):
        if made_with.get(name) != written_with.get(name):
            raise CheckpointError(
                f"the checkpoint {path} is of another fit: {name} was {written_with.get(name)} there, "
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


def crc32(data: bytes) -> int:
    """CRC-32: enough to notice another data set, and no protection against an attacker."""
    return zlib.crc32(data)
