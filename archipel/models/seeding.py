"""Networks from a seed: same seed, same parameters, and PyTorch's global random state left as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from archipel.errors import MissingExtraError


@contextmanager
def seeded(seed: int) -> Iterator[ModuleType]:
    """Gives `torch.nn` with the generator at `seed`. Raises MissingExtraError without PyTorch."""
    try:
        import torch
        from torch import nn
    except ImportError as error:
        raise MissingExtraError("torch", "cloud") from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield nn
