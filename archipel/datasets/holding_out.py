"""Divides a data set into one to train on and one to validate on."""

from __future__ import annotations

import os

import numpy as np

from archipel.datasets.dataset import Dataset, Subset
from archipel.datasets.opening import as_dataset
from archipel.datasets.taking import rows_a_piece, take
from archipel.errors import DatasetError
from archipel.permutations import permutation

# The phase of the permutation; those of batches are others, so the validation's examples are no batches of an epoch.
_HELD_OUT = 1 << 31


def hold_out(data: object, share: float = 0.1, *, seed: int = 0, by: str | None = None) -> tuple[Subset, Subset]:
    """Divide a data set at random: (the rest, a share of the examples), both in the order of the data set.

    Arguments:
        data: anything that `as_dataset` makes a data set of; no stream.
        share: above 0 and below 1. Each part has at least one example.
        seed: decides which examples, 0 ... 2**32 - 1; the same under every version of NumPy.
        by: a field of labels, whole numbers without axes. Then each label's share is held out, so that both parts have
            the classes in the same proportion: rounded, and at least one example of a label that has two.

    Raises DatasetError for a share or seed out of range, a field that is none of labels, a part without examples.

    Example:
        train, validation = hold_out("train.parquet", 0.1, by="label")
    """
    dataset = as_dataset(data)
    if not isinstance(dataset, Dataset):
        raise DatasetError("a stream cannot be divided; convert it to a record file first")
    if not 0 < share < 1 or not 0 <= seed < 2**32:
        raise DatasetError(f"share must be above 0 and below 1, seed 0..{2**32 - 1}; got {share} and {seed}")
    order = permutation(len(dataset), seed, _HELD_OUT, 0)
    if by is None:
        chosen = order[: _count(len(order), share)]
    else:
        labels = _read_labels(dataset, by)[order]
        parts = [order[labels == label] for label in np.unique(labels)]
        # A label of one example stays in training.
        chosen = np.concatenate([part[: _count(len(part), share) if len(part) > 1 else 0] for part in parts])
    held = np.zeros(len(dataset), bool)
    held[chosen] = True
    if held.all() or not held.any():
        where = f"{data}: " if isinstance(data, str | os.PathLike) else ""
        raise DatasetError(f"{where}{len(dataset)} examples are too few to hold out {share} of them; give more data")
    return Subset(dataset, np.flatnonzero(~held)), Subset(dataset, np.flatnonzero(held))


def _count(examples: int, share: float) -> int:
    return min(max(round(examples * share), 1), examples - 1)


def _read_labels(dataset: Dataset, by: str) -> np.ndarray:
    field = dataset.fields.get(by)
    if field is None or field.shape or field.dtype.kind not in "iub":
        what = "missing" if field is None else str(field)
        raise DatasetError(f"field {by!r} is {what}; expected labels, whole numbers without axes")
    size = rows_a_piece(dataset.fields)
    starts = range(0, len(dataset), size)
    return np.concatenate([take(dataset, np.arange(start, min(start + size, len(dataset))))[by] for start in starts])
