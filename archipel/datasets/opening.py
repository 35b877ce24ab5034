"""Makes a data set of what people have: arrays, pairs of inputs and labels, data sets of other libraries, files."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from archipel.datasets.dataset import INPUT, LABEL, ArrayDataset, Dataset, Stream
from archipel.datasets.labelled import Labelled
from archipel.errors import DatasetError


def as_dataset(data: object) -> Dataset | Stream:
    """A data set of any of these:

    - a `Dataset` or a `Stream`: itself
    - a dict of arrays `[examples, ...]`: its names are the fields
    - `(inputs, labels)`: the fields "input" and "label"
    - `Labelled`: the same

    Raises DatasetError for anything else, and for arrays that do not fit each other.

    Example:
        data = as_dataset((x, y))
        data.take(np.array([0, 5]))["label"]
    """
    if isinstance(data, Labelled):
        return ArrayDataset({INPUT: data.inputs, LABEL: data.labels})
    if isinstance(data, Dataset | Stream):
        return data
    if isinstance(data, Mapping):
        return ArrayDataset(data)
    if isinstance(data, tuple) and len(data) == 2:
        return ArrayDataset({INPUT: data[0], LABEL: data[1]})
    if isinstance(data, np.ndarray):
        return ArrayDataset({INPUT: data})
    raise DatasetError(
        f"expected a data set, arrays by name or (inputs, labels), got {type(data).__name__}; "
        "see archipel.datasets.Dataset for what a data set has"
    )
