"""The random generators of a process: PyTorch's on the CPU and on every GPU, NumPy's and Python's."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np


def seed_generators(seed: int) -> None:
    """Begin all of them anew."""
    import torch

    torch.manual_seed(seed)  # every GPU's, too
    np.random.seed(seed % 2**32)
    random.seed(seed)


def generator_states() -> dict[str, Any]:
    """Their states, in types that PyTorch's unpickler of weights reads."""
    import torch

    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys, np.int64)), position, has_gauss, cached],
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        states["mps"] = torch.mps.get_rng_state()
    return states


def set_generator_states(states: Mapping[str, Any]) -> None:
    """Continue where `generator_states` was called. Raises KeyError, TypeError and ValueError for other states.

    A GPU that was not there then keeps its state.
    """
    import torch

    torch.set_rng_state(states["torch"].cpu())
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, keys.cpu().numpy().astype(np.uint32), position, has_gauss, cached))
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    if torch.cuda.is_available():
        for index, state in enumerate(states.get("cuda", [])[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state.cpu(), index)
    if torch.backends.mps.is_available() and "mps" in states:
        torch.mps.set_rng_state(states["mps"].cpu())


@contextmanager
def kept_generators() -> Iterator[None]:
    """A context after which all generators are where they were before it."""
    before = generator_states()
    try:
        yield
    finally:
        set_generator_states(before)
