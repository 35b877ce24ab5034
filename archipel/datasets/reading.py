"""Reads a whole data set into arrays, in memory or in files that are mapped."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipel.datasets.dataset import ArrayDataset, Arrays, Dataset, Field
from archipel.datasets.opening import as_dataset
from archipel.datasets.order import count_of
from archipel.datasets.taking import pieces_of, rows_a_piece
from archipel.errors import DatasetError


def read_arrays(
    data: object, fields: Sequence[str] | None = None, *, folder: str | os.PathLike[str] | None = None
) -> Arrays:
    """All examples of a data set by field, for what needs all of them: labels to split by, a simulation's clients.

    Arguments:
        data: anything that `as_dataset` takes: arrays, files, data sets of PyTorch or Hugging Face.
        fields: which of its fields; None: all.
        folder: where to write the arrays, one `.npy` file a field, which are then mapped and not held in memory; None
            holds them in memory.

    Returns an array `[examples, ...]` for each field; those of arrays in memory or of mapped files are these
    themselves. Raises DatasetError for a field that there is not, for one whose examples have different shapes, and for
    examples that cannot be read.

    Example:
        labels = read_arrays(open_file("train.parquet"), ["label"])["label"]
        parts = split_dirichlet(labels, 100, alpha=0.5)
    """
    dataset = as_dataset(data)
    names = list(dataset.fields) if fields is None else list(fields)
    if unknown := [name for name in names if name not in dataset.fields]:
        raise DatasetError(f"no field {unknown[0]!r}; the data set has {', '.join(dataset.fields)}")
    if isinstance(dataset, ArrayDataset) and folder is None:
        return {name: dataset.arrays[name] for name in names}
    if not isinstance(dataset, Dataset):
        if folder is not None:
            raise DatasetError("nobody knows how many examples a stream has; convert it first: archipel data convert")
        read = [{name: piece[name] for name in names} for piece in pieces_of(dataset, rows_a_piece(dataset.fields))]
        _check_shapes(read, names)
        return {name: np.concatenate([piece[name] for piece in read]) for name in names} if read else {}
    count, start = len(dataset), 0
    arrays: Arrays = {}
    for piece in pieces_of(dataset, rows_a_piece(dataset.fields)):
        for name in names:
            if name not in arrays:
                arrays[name] = _empty(dataset.fields[name], (count, *piece[name].shape[1:]), name, folder)
            if piece[name].shape[1:] != arrays[name].shape[1:]:
                raise _uneven(name, piece[name].shape[1:], arrays[name].shape[1:])
            arrays[name][start : start + len(piece[name])] = piece[name]
        start += count_of(piece)
    return arrays


def _empty(field: Field, shape: tuple[int, ...], name: str, folder: str | os.PathLike[str] | None) -> NDArray[Any]:
    if folder is None:
        return np.empty(shape, field.dtype)
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    # The name comes from a file's columns, and must not lead out of the folder.
    if not name.replace("_", "").replace("-", "").isalnum():
        raise DatasetError(f"field {name!r} is no name for a file; choose other fields, or rename it")
    return np.lib.format.open_memmap(path / f"{name}.npy", mode="w+", dtype=field.dtype, shape=shape)


def _check_shapes(read: Sequence[Arrays], names: Sequence[str]) -> None:
    for piece in read[1:]:
        for name in names:
            if piece[name].shape[1:] != read[0][name].shape[1:]:
                raise _uneven(name, piece[name].shape[1:], read[0][name].shape[1:])


def _uneven(name: str, got: tuple[int, ...], before: tuple[int, ...]) -> DatasetError:
    return DatasetError(
        f"field {name!r}: examples of the shapes {list(before)} and {list(got)}; bring them to one shape first"
    )
