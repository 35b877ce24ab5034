"""Read the examples of `archipel up`: a file with the fields of the model's inputs and the labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from archipel.cli.input_output.arrays import read_arrays
from archipel.cli.input_output.settings import Setting, read_settings, settings_of
from archipel.datasets import Dataset, open_file
from archipel.datasets.entry_names import LABELS, FieldNames, FieldType
from archipel.datasets.partitioners import FIELD, PARTITIONERS, divide, takes_field
from archipel.datasets.taking import take
from archipel.errors import CommandError, DatasetError


@dataclass(frozen=True)
class Data:
    """The examples: an array for each of the model's inputs, the labels, and what else the file has, by name."""

    path: Path
    inputs: dict[str, np.ndarray]
    labels: np.ndarray
    others: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: np.ndarray) -> Data:
        """The examples at these places."""
        inputs = {name: array[indices] for name, array in self.inputs.items()}
        others = {name: array[indices] for name, array in self.others.items()}
        return Data(self.path, inputs, self.labels[indices], others)

    @property
    def classes(self) -> int | None:
        """The number of classes where labels are classes, else None."""
        whole = self.labels.ndim == 1 and self.labels.dtype.kind == "i"
        return int(self.labels.max()) + 1 if whole else None


def read_data(path: Path, inputs: Sequence[tuple[str, str]]) -> Data:
    """The examples in a file for a model with these inputs, pairs of name and dtype.

    An .npz has an entry for each input, or `x` where the model has one, and the labels as `y` (or `label`, `labels`,
    `target`). Other files are what `archipel.datasets.open_file` opens: a .csv has the labels in a column of such a
    name, or the last one; the others are the features.

    Raises CommandError and DatasetError that name file, field and remedy, OSError.
    """
    arrays = read_arrays(path) if path.suffix.lower() in ("", ".npz", ".npy") else _read_dataset(path)
    if isinstance(arrays, np.ndarray):
        raise CommandError(f"{path}: one array without labels; save both: numpy.savez({path.stem!r}, x=x, y=y)")
    if single := [name for name, array in arrays.items() if not array.ndim]:
        raise CommandError(f"{path}: entry {single[0]!r} is a single number; the first axis counts the examples")
    found = [name for name in LABELS if name in arrays and name not in dict(inputs)]
    if not found:
        raise CommandError(f"{path}: no labels; name them `y` (it has {', '.join(sorted(arrays))})")
    named = FieldNames({name: FieldType(dtype) for name, dtype in inputs}, {found[0]: FieldType()})
    taken = named.take(str(path), arrays)
    labels = taken[found[0]]
    if labels.dtype.kind == "i" and labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]  # a column of classes
    # An array of another length says nothing about single examples.
    others = {name: array for name, array in taken.items()
              if name not in (*named.inputs, *named.labels) and array.shape[:1] == (len(labels),)}  # fmt: skip
    return Data(path, {name: taken[name] for name in named.inputs}, labels, others)


def split(data: Data, how: str, devices: int, seed: int) -> list[np.ndarray]:
    """The indices of each device's examples.

    `how`: by-FIELD, or the name of a partitioner, with NAME=VALUE,... after a colon; the first may be VALUE alone.
    Raises CommandError.
    """
    name, _, text = how.partition(":")
    if how.startswith("by-"):
        name, settings = "by", {FIELD: how.removeprefix("by-")}
    elif name not in PARTITIONERS:
        raise CommandError(f"--split {how}: expected by-FIELD, or one of {', '.join(PARTITIONERS)}")
    else:
        settings = _settings(how, name, text)
    try:
        parts = divide(name, devices, settings, count=len(data), labels=data.labels, fields=data.others, seed=seed)
    except DatasetError as error:
        raise CommandError(f"--split {how}, --devices {devices}: {data.path}: {error}") from None
    return list(parts)


def _settings(how: str, name: str, text: str) -> dict[str, Any]:
    # The first two arguments are what is divided, and the number of devices.
    known = dict(list(settings_of(PARTITIONERS[name], but=["seed"]).items())[2:])
    if takes_field(name):
        known = {FIELD: Setting(FIELD, str), **known}
    texts = text.split(",") if text else []
    if texts and known and "=" not in texts[0]:
        texts[0] = f"{next(iter(known))}={texts[0]}"
    found = read_settings("--split", texts, known, name)
    for each in known.values():
        if each.needed and each.name not in found:
            raise CommandError(f"--split {how}: {each.name} is missing; write {name}:{each.name}=VALUE")
    return found


def _read_dataset(path: Path) -> dict[str, np.ndarray]:
    """All examples of a file that `archipel.datasets` opens."""
    # The widest: `FieldNames.take` says what the model's own type does not hold.
    dataset = open_file(path, **({"dtype": "float64"} if ".csv" in path.suffixes or ".tsv" in path.suffixes else {}))
    if not isinstance(dataset, Dataset):
        raise CommandError(f"{path}: nobody knows how many examples it has; convert it first: archipel data convert")
    return dict(take(dataset, np.arange(len(dataset))))
