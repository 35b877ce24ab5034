"""MNIST and Fashion-MNIST from the four IDX files they are published in.

LeCun, Cortes, Burges, "The MNIST database of handwritten digits"; Xiao, Rasul, Vollgraf 2017, "Fashion-MNIST".
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from archipel.datasets.labelled import Labelled, LabelledSplits, check_labels, draw_split, scale_pixels
from archipel.datasets.published.idx import read_idx
from archipel.errors import DatasetError

DIGITS = tuple("0123456789")
CLOTHES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


def mnist(
    folder: str | os.PathLike[str], *, seed: int = 0, validation: int = 5_000, flat: bool = False
) -> LabelledSplits:
    """Handwritten digits, float32 [n, 1, 28, 28] in 0..1: 55,000 to train, 5,000 to validate, 10,000 to test.

    Arguments:
        folder: the folder with train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz and the same of t10k.
        seed: determines which of the 60,000 training pictures are for validation, and the order.
        validation: the number of pictures for validation.
        flat: whether the pictures are laid out in one row each, float32 [n, 784], for networks without convolutions.

    Returns the three parts; the test part is the same for every seed.

    Raises DatasetError if a file is missing or damaged.

    Example:
        data = mnist("/data/mnist")
        runtime.fit(data.train.inputs, data.train.labels)
    """
    return _read_splits("MNIST", Path(folder), DIGITS, seed, validation, flat)


def fashion_mnist(
    folder: str | os.PathLike[str], *, seed: int = 0, validation: int = 5_000, flat: bool = False
) -> LabelledSplits:
    """Articles of clothing, float32 [n, 1, 28, 28] in 0..1: 55,000 to train, 5,000 to validate, 10,000 to test.

    Files, split, `flat` and errors are as for `mnist`.

    Example:
        data = fashion_mnist("/data/fashion")
        runtime.fit(data.train.inputs, data.train.labels)
    """
    return _read_splits("Fashion-MNIST", Path(folder), CLOTHES, seed, validation, flat)


def _read_splits(
    name: str, folder: Path, classes: tuple[str, ...], seed: int, validation: int, flat: bool
) -> LabelledSplits:
    images, labels = _read_part(name, folder, "train", classes)
    train, held_out = draw_split(name, len(labels), validation, seed)
    return LabelledSplits(
        train=_to_labelled(images[train], labels[train], flat),
        validation=_to_labelled(images[held_out], labels[held_out], flat),
        test=_to_labelled(*_read_part(name, folder, "t10k", classes), flat),
        classes=classes,
    )


def _read_part(
    name: str, folder: Path, part: str, classes: tuple[str, ...]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    remedy = f"put the published {name} files there again"
    images_path, labels_path = folder / f"{part}-images-idx3-ubyte.gz", folder / f"{part}-labels-idx1-ubyte.gz"
    images, labels = read_idx(images_path, (28, 28), remedy), read_idx(labels_path, (), remedy)
    if len(images) != len(labels):
        raise DatasetError(
            f"{images_path} has {len(images)} images and {labels_path.name} {len(labels)} labels; {remedy}"
        )
    check_labels(labels, classes, str(labels_path), remedy)
    return images, labels


def _to_labelled(images: NDArray[np.uint8], labels: NDArray[np.uint8], flat: bool) -> Labelled:
    pixels = scale_pixels(images)
    return Labelled(pixels.reshape(len(pixels), -1) if flat else pixels[:, None], labels.astype(np.int64))
