"""Makes a data set of what people have: arrays, pairs of inputs and labels, data sets of other libraries, files."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from archipel.datasets.dataset import INPUT, LABEL, ArrayDataset, Dataset, Stream
from archipel.datasets.labelled import Labelled
from archipel.datasets.readers.examples import IndexedExamples, IteratedExamples, is_indexed
from archipel.datasets.readers.hugging_face import HuggingFaceDataset, is_hugging_face
from archipel.errors import DatasetError

_BY_SUFFIX = {
    # What a file's name ends with: "module:function" in `archipel.datasets.readers`.
    ".csv": "csv_files:open_csv",
    ".csv.gz": "csv_files:open_csv",
    ".tsv": "csv_files:open_csv",
    ".tsv.gz": "csv_files:open_csv",
    ".data.gz": "csv_files:open_csv",
    ".parquet": "parquet:open_parquet",
    ".arrow": "arrow_files:open_arrow",
    ".feather": "arrow_files:open_arrow",
    ".npy": "arrays:open_arrays",
    ".npz": "arrays:open_arrays",
    ".txt": "text:open_text",
    ".txt.gz": "text:open_text",
}
_BY_CONTENT = {
    # What lies in a folder: the same.
    "*.parquet": "parquet:open_parquet",
    "*.npy": "arrays:open_arrays",
    "*.txt": "text:open_text",
    "*.txt.gz": "text:open_text",
}


def as_dataset(data: object) -> Dataset | Stream:
    """A data set of any of these:

    - a `Dataset` or a `Stream`: itself
    - a dict of arrays `[examples, ...]`: its names are the fields
    - `(inputs, labels)`: the fields "input" and "label"
    - `Labelled`: the same
    - a path: `open_file` opens it
    - a data set of Hugging Face's `datasets` or of PyTorch (map-style or iterable), a list of examples, or anything
      else whose examples are indexed or iterated

    Raises DatasetError for anything else, and for arrays that do not fit each other.

    Example:
        data = as_dataset((x, y))
        data.take(np.array([0, 5]))["label"]
    """
    if isinstance(data, Labelled):
        return ArrayDataset({INPUT: data.inputs, LABEL: data.labels})
    if isinstance(data, Dataset | Stream):
        return data
    if isinstance(data, str | os.PathLike):
        return open_file(data)
    if isinstance(data, Mapping):
        return ArrayDataset(data)
    if isinstance(data, tuple) and len(data) == 2:
        return ArrayDataset({INPUT: data[0], LABEL: data[1]})
    if isinstance(data, np.ndarray):
        return ArrayDataset({INPUT: data})
    if is_hugging_face(data):
        return HuggingFaceDataset(data)
    if is_indexed(data):
        return IndexedExamples(data)
    if isinstance(data, Iterable):
        return IteratedExamples(data)
    raise DatasetError(
        f"expected a data set, a path, arrays by name or (inputs, labels), got {type(data).__name__}; "
        "see archipel.datasets.Dataset for what a data set has"
    )


def open_file(path: str | os.PathLike[str], **options: Any) -> Dataset | Stream:
    """The examples of a file or folder, by what its name ends with or what lies in it.

    Arguments:
        path: the file or folder.
        options: what the reader of such files takes: `open_csv`, `open_parquet`, `open_arrow`, `open_arrays`,
            `open_text`, `open_images` or `open_audio`.

    Raises DatasetError for a file of another kind, an option that its reader does not have, and as its reader does.

    Example:
        data = open_file("adult.csv", on_bad="skip")
    """
    where = Path(path)
    if where.is_dir():
        found = [reader for pattern, reader in _BY_CONTENT.items() if next(where.glob(pattern), None)]
        found = found or [reader for suffixes, reader in _in_folders() if _has(where, suffixes)]
        if not found:
            raise DatasetError(
                f"{where}: nothing in this folder can be read as data ({', '.join(_BY_CONTENT)}, pictures or sounds, "
                "alone or in a folder for each class)"
            )
    else:
        found = [reader for suffix, reader in _BY_SUFFIX.items() if where.name.lower().endswith(suffix)]
        if not found:
            kinds = ", ".join(_BY_SUFFIX)
            raise DatasetError(f"{where}: expected a file that ends with one of {kinds}; name it so, or convert it")
    module, _, function = found[0].partition(":")
    opener = getattr(importlib.import_module(f"archipel.datasets.readers.{module}"), function)
    known = opener.__kwdefaults__ or {}
    if unknown := sorted(set(options) - set(known)):
        raise DatasetError(f"{where}: {function} has no option {unknown[0]!r}; it has {', '.join(sorted(known))}")
    try:
        opened: Dataset | Stream = opener(where, **options)
    except (TypeError, AttributeError) as error:
        if not options:
            raise
        raise DatasetError(f"{where}: {function} cannot take {options} ({error}); look at its documentation") from error
    return opened


def _in_folders() -> list[tuple[tuple[str, ...], str]]:
    from archipel.datasets.readers import audio, images

    return [(images.SUFFIXES, "images:open_images"), (audio.SUFFIXES, "audio:open_audio")]


def _has(folder: Path, suffixes: tuple[str, ...]) -> bool:
    return any(
        name.lower().endswith(suffixes) for _, _, names in os.walk(folder) for name in names if not name.startswith(".")
    )
