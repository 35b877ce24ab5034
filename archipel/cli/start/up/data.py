"""Read the examples of `archipel up`: an .npz or a .csv, with the fields of the model's inputs and the labels."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from archipel.cli.input_output.arrays import read_arrays
from archipel.datasets import split_by, split_dirichlet, split_iid
from archipel.datasets.entry_names import LABELS
from archipel.errors import CommandError, DatasetError

MAX_ROWS = 5_000_000
MAX_WHOLE = 2**53  # beyond it float64 does not hold every whole number


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
    `target`). A .csv has a head and columns of numbers: the labels in a column of such a name, or the last one; the
    others are the features.

    Raises CommandError that names file, field and remedy, OSError.
    """
    arrays = _read_csv(path, inputs) if path.suffix.lower() == ".csv" else read_arrays(path)
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


def _read_csv(path: Path, inputs: Sequence[tuple[str, str]]) -> dict[str, np.ndarray]:
    if len(inputs) != 1:
        names = ", ".join(name for name, _ in inputs)
        raise CommandError(f"{path}: a table is for a model with one input, this one has {names}; give an .npz")
    try:
        head, values = _read_rows(path)
    except (UnicodeDecodeError, csv.Error) as error:
        raise CommandError(f"{path}: no CSV in UTF-8 ({error}); save it as that") from None
    if not values:
        raise CommandError(f"{path}: no rows below the head")
    table = np.array(values, np.float64)
    label = next((at for at, name in enumerate(head) if name.lower() in LABELS), len(head) - 1)
    labels = table[:, label]
    # Beyond MAX_WHOLE, and so infinite ones, they are no classes.
    whole = bool(((labels == np.round(labels)) & (np.abs(labels) <= MAX_WHOLE)).all())
    return {"x": np.delete(table, label, axis=1), "y": labels.astype(np.int64) if whole else labels}


def _read_rows(path: Path) -> tuple[list[str], list[list[float]]]:
    """The head of a table, and the numbers below it. Raises CommandError, UnicodeDecodeError, csv.Error, OSError."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.reader(file)
        head = [name.strip() for name in next(rows, [])]
        if len(head) < 2:
            raise CommandError(f"{path}: expected a head with names of columns, and commas between them")
        if all(_is_number(name) for name in head):
            raise CommandError(f"{path}: line 1 has numbers; write a head with names of columns above it")
        values = []
        for number, row in enumerate(rows, 2):
            if number > MAX_ROWS:
                raise CommandError(f"{path}: more than {MAX_ROWS:,} rows; give an .npz")
            if not row:
                continue
            if len(row) != len(head):
                raise CommandError(f"{path}: line {number} has {len(row)} columns, the head has {len(head)}")
            try:
                values.append([float(cell) for cell in row])
            except ValueError:
                at = next(at for at, cell in enumerate(row) if not _is_number(cell))
                raise CommandError(
                    f"{path}: line {number}, column {head[at]!r}: {row[at][:40]!r} is no number; give numbers, and "
                    "classes as whole numbers from 0"
                ) from None
    return head, values


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
