"""Networks from a seed: same seed, same parameters, and PyTorch's global random state left as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from archipel.errors import MissingExtraError


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """PyTorch's generator starts at `seed` inside. Raises MissingExtraError without PyTorch."""
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError("torch", "cloud") from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
