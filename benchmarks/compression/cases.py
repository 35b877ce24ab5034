"""The float models of the compression study: which network learns what, how, and to which floor.

A case was tuned by its validation part; the test part is only reported.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from archipel import datasets, models
from archipel.datasets import LabelledSplits

SPLIT_SEED = 0
"""All seeds of a case share one division into training and validation; a seed is the network's and the order's."""


@dataclass(frozen=True)
class Phase:
    """One cycle of the learning rate; `shrink` 2 trains on pictures of half the side, a quarter of the cost."""

    epochs: int
    learning_rate: float
    batch_size: int = 128
    weight_decay: float = 5e-4
    shrink: int = 1


@dataclass(frozen=True)
class Case:
    """`make` and `options` are the network's in `archipel.models`; `floor` is the test accuracy it must reach."""

    make: str
    data: str
    floor: float
    phases: tuple[Phase, ...]
    options: tuple[tuple[str, Any], ...] = ()
    shift: int = 0  # pixels
    flip: bool = False
    scale: float = 0.0  # share
    seeds: tuple[int, ...] = (0,)

    def network(self, seed: int) -> Any:
        return getattr(models, self.make)(seed, **dict(self.options))

    def augment(self) -> Any:
        """The augmentation of training batches, None without any."""
        from archipel.training.cloud import in_turn, random_flip, random_scale, random_shift

        steps = [
            *([random_shift(self.shift)] if self.shift else []),
            *([random_flip()] if self.flip else []),
            *([random_scale(self.scale)] if self.scale else []),
        ]
        return in_turn(*steps) if steps else None

    def digest(self, seed: int) -> str:
        """Changes with whatever decides the trained network: this case, the seed, the network's source."""
        source = inspect.getsource(inspect.getmodule(getattr(models, self.make)))  # type: ignore[arg-type]
        return hashlib.sha256(f"{self} {seed} {SPLIT_SEED} {source}".encode()).hexdigest()[:16]


# The cheapest first, so that a study that is stopped has something to show.
CASES = {
    "digits-cnn": Case("digits_cnn", "mnist", 0.985, (Phase(6, 0.05, batch_size=64),), shift=1, seeds=(0, 1, 2)),
    "har-cnn": Case(
        "cnn_1d", "har", 0.90, (Phase(6, 0.02, batch_size=64, weight_decay=1e-2),), scale=0.2, seeds=(0, 1, 2)
    ),
    "fashion-ds-cnn": Case("ds_cnn", "fashion_mnist", 0.90, (Phase(5, 0.2),), (("classes", 10),), flip=True),
    "fashion-resnet8": Case("resnet8", "fashion_mnist", 0.90, (Phase(5, 0.2),), (("channels", 1),), flip=True),
    "cifar-resnet8": Case("resnet8", "cifar10", 0.75, (Phase(10, 0.2),), shift=3, flip=True),
    "fashion-mobilenet-v2": Case(
        "mobilenet_v2",
        "fashion_mnist",
        0.90,
        (Phase(4, 0.1, shrink=2), Phase(1, 0.05)),
        (("channels", 1), ("width", 0.35)),
        flip=True,
    ),
}

_READERS: dict[str, tuple[Callable[..., LabelledSplits], str]] = {
    "mnist": (datasets.mnist, "mnist_by_writer"),
    "fashion_mnist": (datasets.fashion_mnist, "fashion_mnist"),
    "cifar10": (datasets.cifar10, "cifar10"),
    "har": (datasets.har_windows, "hapt_har"),
}


@lru_cache(maxsize=1)
def read(data: str, folder: Path) -> LabelledSplits:
    """A case's data, from the folder of all data sets; the last one asked for stays in memory."""
    reader, name = _READERS[data]
    return reader(folder / name, seed=SPLIT_SEED)


def shrunk(inputs: np.ndarray, factor: int) -> np.ndarray:
    """Means over factor x factor pixels: float32 [n, channels, height, width] with both sides divided."""
    if factor == 1:
        return inputs
    count, channels, height, width = inputs.shape
    blocks = inputs.reshape(count, channels, height // factor, factor, width // factor, factor)
    return np.ascontiguousarray(blocks.mean(axis=(3, 5), dtype=np.float32))
