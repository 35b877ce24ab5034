"""Scenes for segmentation: real digits and real clothes on one canvas, with a class for each pixel.

Made of the pictures of MNIST and Fashion-MNIST, which have no masks: a pixel belongs to what was drawn on it. Digits
and clothes overlap, and all have noise behind them; both may have any brightness, so no pixel tells its class by
itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from archipel.datasets.dataset import INPUT, LABEL, Arrays, Dataset, Field
from archipel.datasets.published.mnist import fashion_mnist, mnist

CLASSES = ("background", "digit", "clothing")
OBJECTS = 4
"""In a scene: each a digit or an article of clothing, with equal chances."""
NOISE = 0.1
"""Standard deviation of the noise, where pixels are from 0 to 1."""
EDGE = 0.2
"""From this brightness on a pixel of a picture belongs to its object."""


class Scenes:
    """Scenes that are drawn when they are read: "input" float32 [1, size, size], "label" int64 [size, size].

    What a scene has follows from `seed` and its number alone, so it is the same in every epoch.

    Arguments:
        digits: pictures float32 [n, 1, side, side] in 0..1.
        clothes: others of the same side.
        count: the number of scenes.
        size: of a scene's side, at least `side`.
        seed: determines the scenes.

    Example:
        pictures = digits_by_writer().inputs()
        scenes = Scenes(pictures[:100], pictures[100:200], count=10)
        print(scenes.take(np.array([0, 3]))["input"].shape)  # (2, 1, 64, 64)
    """

    def __init__(
        self, digits: NDArray[np.float32], clothes: NDArray[np.float32], count: int, size: int = 64, seed: int = 0
    ) -> None:
        self._pictures = (digits[:, 0], clothes[:, 0])
        self._count, self._size, self._seed = count, size, seed
        self.fields: Mapping[str, Field] = {
            INPUT: Field(np.dtype(np.float32), (1, size, size)),
            LABEL: Field(np.dtype(np.int64), (size, size)),
        }

    def __len__(self) -> int:
        return self._count

    def take(self, rows: NDArray[np.intp]) -> Arrays:
        """The scenes of these numbers."""
        inputs = np.empty((len(rows), 1, self._size, self._size), np.float32)
        labels = np.zeros((len(rows), self._size, self._size), np.int64)
        for place, row in enumerate(rows):
            self._draw(int(row), inputs[place, 0], labels[place])
        return {INPUT: inputs, LABEL: labels}

    def _draw(self, row: int, canvas: NDArray[np.float32], label: NDArray[np.int64]) -> None:
        rng = np.random.default_rng([self._seed, row])
        canvas[:] = np.abs(rng.normal(0.0, NOISE, canvas.shape))
        for _ in range(OBJECTS):
            kind = int(rng.integers(2))
            picture = self._pictures[kind][rng.integers(len(self._pictures[kind]))]
            side = len(picture)
            top, left = rng.integers(0, self._size - side + 1, 2)
            place = np.s_[top : top + side, left : left + side]
            own = picture >= EDGE
            canvas[place][own] = picture[own]
            label[place][own] = kind + 1


@dataclass(frozen=True, eq=False)
class SceneSplits:
    """Scenes in three parts, each of the pictures of the same part of MNIST and Fashion-MNIST (see Scenes).

    `classes` are the names of a pixel's labels 0, 1, ...

    Example: see `archipel.datasets.digits_and_clothes`.
    """

    train: Dataset
    validation: Dataset
    test: Dataset
    classes: tuple[str, ...] = CLASSES


def digits_and_clothes(
    digits: str | os.PathLike[str], clothes: str | os.PathLike[str], *, seed: int = 0, train: int = 10_000,
    validation: int = 1_000, test: int = 1_000, size: int = 64,
) -> SceneSplits:  # fmt: skip
    """Scenes of four digits and articles of clothing, float32 [1, size, size], with a class for each pixel.

    Arguments:
        digits: the folder with the four files of MNIST.
        clothes: the folder with the four files of Fashion-MNIST.
        seed: determines which pictures are for validation, and the scenes; those of the test part are always the same.
        train, validation, test: the number of scenes of each part.
        size: of a scene's side in pixels, at least 28.

    Raises DatasetError if a file is missing or damaged.

    Example:
        scenes = digits_and_clothes("/data/mnist", "/data/fashion_mnist")
        batch = scenes.test.take(np.arange(4))
    """
    first, second = mnist(digits, seed=seed), fashion_mnist(clothes, seed=seed)
    parts = [
        Scenes(own.inputs, other.inputs, count, size, number)
        for own, other, count, number in (
            (first.train, second.train, train, 2 * seed + 1),
            (first.validation, second.validation, validation, 2 * seed + 2),
            (first.test, second.test, test, 0),
        )
    ]
    return SceneSplits(parts[0], parts[1], parts[2])
