"""Clients of any data set: NumPy's arrays, files, data sets of PyTorch and of Hugging Face."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipel.datasets import ArrayDataset, Subset, read_arrays
from archipel.simulation.clients import SplitClients


def split_clients(
    data: object,
    parts: Sequence[NDArray[np.integer[Any]]],
    *,
    fields: Sequence[str] | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> SplitClients:
    """Divide a data set over simulated clients.

    Arguments:
        data: anything that `datasets.as_dataset` takes: arrays by name, (inputs, labels), a file (Parquet, CSV, `.npz`
            and others), a data set of PyTorch or Hugging Face. Its fields are called as the model's inputs and labels,
            "input" and "label" for most.
        parts: each client's rows in it, as `datasets.split_dirichlet` and its like return them.
        fields: which fields clients have; None: all.
        folder: where examples that do not lie in arrays are written, so that they are mapped and not held in memory;
            it is needed for data larger than memory.

    Arrays and mapped files are not copied. Raises DatasetError, SimulationError.

    Example:
        data = archipel.datasets.open_file("train.parquet")
        labels = archipel.datasets.read_arrays(data, ["label"])["label"]
        clients = archipel.simulation.split_clients(data, archipel.datasets.split_shards(labels, 100))
    """
    if isinstance(data, Subset) and isinstance(data.dataset, ArrayDataset):
        return SplitClients(
            read_arrays(data.dataset, fields), [data.rows[np.asarray(part, np.int64)] for part in parts]
        )
    return SplitClients(read_arrays(data, fields, folder=folder), parts)
