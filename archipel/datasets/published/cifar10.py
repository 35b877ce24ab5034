"""CIFAR-10 from one file of JPEG pictures (Krizhevsky 2009, "Learning Multiple Layers of Features from Tiny Images").

The file is an .npz: `header` is the beginning that all JPEG pictures share, `data` the rest of each, one after another,
`offset` where each begins, `y` the labels, `n_train` the number of training pictures, which come first. JPEG is lossy,
so results differ a little from those on the original pixels.
"""

from __future__ import annotations

import io
import os
import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from archipel.datasets.labelled import Labelled, LabelledSplits, check_labels, draw_split, scale_pixels
from archipel.datasets.npz import Column, read_npz
from archipel.datasets.splits import seeded_order
from archipel.errors import DatasetError, MissingExtraError

FILE = "cifar10_jpeg_60000.npz"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE = 32

MAX_PICTURES = 100_000
COLUMNS = {
    "header": Column("uint8", (None,), 10_000),
    "data": Column("uint8", (None,), 200_000_000),
    "offset": Column("int64", (None,), MAX_PICTURES + 1),
    "y": Column("uint8", (None,), MAX_PICTURES),
    "n_train": Column("int64"),
}
REMEDY = f"put the published {FILE} there again"


def cifar10(folder: str | os.PathLike[str], *, seed: int = 0, validation: int = 5_000) -> LabelledSplits:
    """Colour pictures, float32 [n, 3, 32, 32] in 0..1: 45,000 to train, 5,000 to validate, 10,000 to test.

    Takes about 5 s. The file is sorted by class, the examples are not.

    Arguments:
        folder: the folder with cifar10_jpeg_60000.npz.
        seed: determines which of the 50,000 training pictures are for validation, and the order.
        validation: the number of pictures for validation.

    Returns the three parts; the test part is the same for every seed.

    Raises DatasetError if the file is missing or damaged, MissingExtraError without Pillow.

    Example:
        data = cifar10("/data/cifar10")
        runtime.fit(data.train.inputs, data.train.labels)
    """
    path = Path(folder) / FILE
    columns = read_npz(path, COLUMNS, REMEDY)
    labels, train_total = columns["y"], int(columns["n_train"])
    check_labels(labels, CLASSES, str(path), REMEDY)
    if not 1 <= train_total < len(labels):
        raise DatasetError(f"{path}: n_train is {train_total} of {len(labels)} pictures; {REMEDY}")
    pixels = _decode(columns["header"], columns["data"], columns["offset"], len(labels), path)
    train, held_out = draw_split("CIFAR-10", train_total, validation, seed)
    # Without `seed`: the test part and its order are always the same.
    test = train_total + np.array(seeded_order(range(len(labels) - train_total), "CIFAR-10 test"), np.intp)
    learning, validating, testing = (
        Labelled(scale_pixels(pixels[rows].transpose(0, 3, 1, 2)).copy(order="C"), labels[rows].astype(np.int64))
        for rows in (train, held_out, test)
    )
    return LabelledSplits(learning, validating, testing, CLASSES)


def _decode(
    header: NDArray[np.uint8], data: NDArray[np.uint8], offset: NDArray[np.int64], count: int, path: Path
) -> NDArray[np.uint8]:
    """Decode the pictures: uint8 [count, 32, 32, 3], RGB."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("Pillow", "demo") from error

    if len(offset) != count + 1 or offset[0] != 0 or offset[-1] != len(data) or np.any(np.diff(offset) < 0):
        raise DatasetError(
            f"{path}: expected {count + 1} ascending offsets from 0 to {len(data)}, the length of its data; {REMEDY}"
        )
    pixels = np.empty((count, SIDE, SIDE, 3), np.uint8)
    beginning, rest = header.tobytes(), data.tobytes()
    with warnings.catch_warnings():
        # Pillow only warns of huge pictures, which may be a decompression bomb; here the warning is an error.
        warnings.simplefilter("error")
        for row in range(count):
            try:
                # The size is known from the header, so it is checked before Pillow decodes the pixels.
                with Image.open(io.BytesIO(beginning + rest[offset[row] : offset[row + 1]]), formats=["JPEG"]) as image:
                    if image.size != (SIDE, SIDE) or image.mode != "RGB":
                        raise ValueError(f"expected {SIDE} x {SIDE} RGB, it is {image.size} {image.mode}")
                    pixels[row] = np.asarray(image)
            except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Warning) as error:
                raise DatasetError(f"{path}: picture {row} cannot be decoded ({error}); {REMEDY}") from error
    return pixels
