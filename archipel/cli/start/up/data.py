"""Read the examples of `archipel up`: a file with the fields of the model's inputs and the labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from archipel.cli.input_output.arrays import read_arrays
from archipel.datasets import Dataset, open_file, split_by, split_dirichlet, split_iid
from archipel.datasets.dataset import INPUT
from archipel.datasets.entry_names import LABELS
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
    arrays = read_arrays(path) if path.suffix.lower() in ("", ".npz", ".npy") else _read_dataset(path, inputs)
    if isinstance(arrays, np.ndarray):
        raise CommandError(f"{path}: one array without labels; save both: numpy.savez({path.stem!r}, x=x, y=y)")
    if single := [name for name, array in arrays.items() if not array.ndim]:
        raise CommandError(f"{path}: entry {single[0]!r} is a single number; the first axis counts the examples")
    has = f"it has {', '.join(sorted(arrays))}"
    found = [name for name in LABELS if name in arrays and name not in dict(inputs)]
    if not found:
        raise CommandError(f"{path}: no labels; name them `y` ({has})")
    taken: dict[str, np.ndarray] = {}
    for name, dtype in inputs:
        key = name if name in arrays else "x"
        if key not in arrays or (key == "x" and name != "x" and len(inputs) > 1):
            also = ", or `x`" if len(inputs) == 1 else ""
            raise CommandError(f"{path}: no examples for the model's input {name!r}; name them `{name}`{also} ({has})")
        taken[name] = _cast(path, key, arrays[key], dtype)
    labels = arrays[found[0]]
    labels = labels.astype(np.int64) if labels.dtype.kind in "iub" else labels.astype(np.float32)
    if labels.dtype.kind == "i" and labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]  # a column of classes
    counts = {**{name: len(array) for name, array in taken.items()}, found[0]: len(labels)}
    if len(set(counts.values())) != 1:
        sizes = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise CommandError(f"{path}: the fields have different numbers of examples ({sizes}); the first axis counts")
    if not len(labels):
        raise CommandError(f"{path}: no examples: its arrays have the length 0")
    if not np.isfinite(labels).all():
        raise CommandError(f"{path}: {found[0]!r} has labels that are not finite; leave these examples out")
    # An array of another length says nothing about single examples.
    others = {name: array for name, array in arrays.items()
              if name not in taken and name not in (found[0], "x") and array.shape[:1] == (len(labels),)}  # fmt: skip
    return Data(path, taken, labels, others)


def split(data: Data, how: str, devices: int, seed: int) -> list[np.ndarray]:
    """The indices of each device's examples. `how`: iid, dirichlet:ALPHA or by-FIELD. Raises CommandError."""
    try:
        if how == "iid":
            return split_iid(len(data), devices, seed=seed)
        if how.startswith("dirichlet:"):
            try:
                alpha = float(how.removeprefix("dirichlet:"))
            except ValueError:
                raise CommandError(f"--split {how}: expected a number, such as dirichlet:0.3") from None
            return split_dirichlet(data.labels, devices, alpha=alpha, seed=seed)
        if how.startswith("by-"):
            field = how.removeprefix("by-")
            if field not in data.others:
                has = ", ".join(sorted(data.others)) or "none besides examples and labels"
                raise CommandError(f"--split {how}: {data.path} has no field {field!r}; it has {has}")
            return split_by(data.others[field], devices, seed=seed)
    except DatasetError as error:
        raise CommandError(f"--split {how}, --devices {devices}: {data.path}: {error}") from None
    raise CommandError(f"--split {how}: expected iid, dirichlet:ALPHA (such as dirichlet:0.3) or by-FIELD")


def _cast(path: Path, name: str, array: np.ndarray, dtype: str) -> np.ndarray:
    if array.dtype.kind == "f" and np.dtype(dtype).kind in "iu":
        raise CommandError(f"{path}: {name!r} is {array.dtype.name}, the model takes {dtype}; save it as whole numbers")
    with np.errstate(over="ignore"):
        made = np.ascontiguousarray(array, dtype)
    if made.dtype.kind == "f" and not np.isfinite(made).all():
        row = int(np.argwhere(~np.isfinite(made.reshape(len(made), -1)).all(axis=1))[0, 0])
        raise CommandError(f"{path}: {name!r} is not finite in row {row}; mend or leave out such examples")
    return made


def _read_dataset(path: Path, inputs: Sequence[tuple[str, str]]) -> dict[str, np.ndarray]:
    """All examples of a file that `archipel.datasets` opens; a single input may be called "input" there."""
    # The widest: `_cast` says what the model's own type does not hold.
    dataset = open_file(path, **({"dtype": "float64"} if ".csv" in path.suffixes or ".tsv" in path.suffixes else {}))
    if not isinstance(dataset, Dataset):
        raise CommandError(f"{path}: nobody knows how many examples it has; convert it first: archipel data convert")
    arrays = dict(take(dataset, np.arange(len(dataset))))
    if len(inputs) == 1 and inputs[0][0] not in arrays and INPUT in arrays:
        arrays["x"] = arrays.pop(INPUT)
    return arrays
