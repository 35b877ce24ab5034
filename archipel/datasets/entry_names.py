"""Which entry of a file is for which field of a model: by its name, or as `x` and `y`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from archipel.datasets.dataset import INPUT
from archipel.errors import DatasetError

SHORT_INPUT = "x"
LABELS = ("y", "label", "labels", "target")
"""What entries with labels are called, the most usual first."""

Array = TypeVar("Array")


def name_entries(arrays: Mapping[str, Array], inputs: Sequence[str], labels: Sequence[str]) -> dict[str, Array]:
    """The arrays by the names of the fields that they are for.

    An entry has the name of its field. Where none has, `x` is the only input, and `y`, `label`, `labels` or `target`
    the only field of labels. All others keep their names.

    Arguments:
        arrays: the entries of a file by name.
        inputs: the names of the fields that the model reads.
        labels: the names of the fields that losses compare with.
    """
    taken, named = {*inputs, *labels}, dict(arrays)
    for fields, usual in ((inputs, (SHORT_INPUT,)), (labels, LABELS)):
        if len(fields) != 1 or fields[0] in arrays:
            continue
        found = next((name for name in usual if name in arrays and name not in taken), None)
        if found is not None:
            named[fields[0]] = named.pop(found)
    return named


class FieldType(msgspec.Struct, frozen=True):
    """Type and shape of a field `[examples, ...]`, where they are known."""

    dtype: str = ""
    shape: tuple[int | str | None, ...] | None = None


class FieldNames(msgspec.Struct, frozen=True):
    """What the model reads: each input by name, and each label."""

    inputs: dict[str, FieldType]
    labels: dict[str, FieldType]

    def take(
        self, where: str, arrays: Mapping[str, NDArray[Any]], rows: NDArray[Any] | None = None
    ) -> dict[str, NDArray[Any]]:
        """The arrays under the model's names and with its dtypes, and all others as they are.

        Arguments:
            where: what the arrays are, for errors.
            rows: for errors, the number that each row has where the user looks for it (None: these numbers).

        Raises DatasetError that names `where`, the field as the arrays have it, and the remedy.
        """
        given = dict(arrays)
        if INPUT in given and SHORT_INPUT not in given and INPUT not in self.labels:
            given[SHORT_INPUT] = given.pop(INPUT) if INPUT not in self.inputs else given[INPUT]
        named = name_entries(given, list(self.inputs), list(self.labels))
        if SHORT_INPUT not in {*arrays, *self.inputs}:
            named.pop(SHORT_INPUT, None)
        for kind, fields in (("examples for the model's input", self.inputs), ("labels", self.labels)):
            for name, expected in fields.items():
                if name not in named:
                    short = "x" if kind != "labels" else "y"
                    also = f", or `{short}`" if len(fields) == 1 else ""
                    raise DatasetError(
                        f"{where}: no {kind} {name!r}; name them `{name}`{also} (it has {', '.join(sorted(arrays))})"
                    )
                called = next((own for own, array in arrays.items() if array is named[name]), name)
                named[name] = _cast(f"{where}: {called}", np.asarray(named[name]), expected, rows)
        counts = {name: len(named[name]) for name in (*self.inputs, *self.labels)}
        if len(set(counts.values())) != 1 or not min(counts.values()):
            sizes = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise DatasetError(f"{where}: expected as many examples in each field, 1 or more, got {sizes}")
        return named


def _cast(where: str, array: NDArray[Any], expected: FieldType, rows: NDArray[Any] | None) -> NDArray[Any]:
    shape = expected.shape
    if shape is not None and (
        array.ndim != len(shape)
        or any(isinstance(dim, int) and dim != size for dim, size in zip(shape[1:], array.shape[1:]))
    ):
        text = ", ".join("any" if dim is None else str(dim) for dim in shape)
        raise DatasetError(f"{where}: has the shape {list(array.shape)}, the model takes [{text}]; reshape it")
    wanted = np.dtype(expected.dtype or ("int64" if array.dtype.kind in "iub" else "float32"))
    if array.dtype.kind not in "biuf" or (array.dtype.kind == "f" and wanted.kind in "iu"):
        raise DatasetError(f"{where}: is {array.dtype}, the model takes {wanted.name}; convert it first")
    with np.errstate(over="ignore"):
        made = np.ascontiguousarray(array, wanted)
    if made.dtype.kind == "f" and not np.isfinite(made).all():
        row = int(np.argwhere(~np.isfinite(made.reshape(len(made), -1)).all(axis=1))[0, 0])
        row = row if rows is None else int(rows[row])
        raise DatasetError(f"{where}: is not finite in row {row}; mend or leave out such examples")
    return made
