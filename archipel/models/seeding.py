"""Makes networks from a seed: the same seed gives the same parameters. PyTorch's global random state is restored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from archipel.errors import MissingExtraError


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Start PyTorch's generator at `seed` for the block. Raises MissingExtraError without PyTorch."""
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError("torch", "cloud") from error
    # devices=[]: networks are made on the CPU, and saving the state of every GPU would initialise CUDA.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
