"""Examples for the parts of a recipe: an array for each input of the model, and labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from archipel.datasets.entry_names import name_entries
from archipel.errors import CompressionError
from archipel.graph import Model
from archipel.graph.importing.samples import index_bound
from archipel.graph.model import TensorInfo

LABEL = "label"

Data = Mapping[str, np.ndarray] | Sequence[np.ndarray] | np.ndarray
"""Examples as users pass them: arrays by name (labels under "label"; or `x` and `y`, see `name_entries`), in the order
of the inputs (labels last), or one array."""


@dataclass(frozen=True)
class Examples:
    """`fields` has an array for every input of the model, `labels` go to the loss. The first axis of all: examples.

    Example:
        examples = Examples({"input": x}, labels=y)
        print(len(examples.take(slice(0, 32)).labels))  # 32
    """

    fields: Mapping[str, np.ndarray]
    labels: np.ndarray | None = None

    @classmethod
    def of(cls, data: Data, model: Model, what: str, labelled: bool) -> Examples:
        """Check `data` against the inputs of `model`. `what` names it in errors. Raises CompressionError."""
        if isinstance(data, Examples):
            return data
        inputs = model.inputs
        names = [info.name for info in inputs]
        given = _by_name(data, names, what)
        labels = given.pop(LABEL, None)
        if labelled and labels is None:
            raise CompressionError(f"{what}: no labels; pass them under {LABEL!r}, or as the last array of a tuple")
        if set(given) != set(names):
            raise CompressionError(f"{what}: the model has the inputs {names}, got {sorted(given)}")
        fields = {info.name: _fitting(given[info.name], info, what) for info in inputs}
        _check_indices(fields, model, what)
        sizes = {name: len(array) for name, array in fields.items()}
        if labels is not None:
            labels = np.asarray(labels)
            if labels.dtype.kind in "iu":
                labels = labels.astype(np.int64)
            sizes[LABEL] = len(labels) if labels.ndim else 0
        if len(set(sizes.values())) != 1 or min(sizes.values()) < 1:
            raise CompressionError(f"{what}: every array needs the same number of examples, at least one; got {sizes}")
        return cls(fields, labels)

    def __len__(self) -> int:
        return len(next(iter(self.fields.values())))

    def take(self, rows: np.ndarray | slice) -> Examples:
        """The examples at these rows: whole numbers `[m]`, a mask `[examples]` or a slice."""
        labels = None if self.labels is None else self.labels[rows]
        return Examples({name: array[rows] for name, array in self.fields.items()}, labels)

    def batches(self, size: int) -> Iterator[Examples]:
        """Batches of `size` examples in order; the last may be smaller."""
        for start in range(0, len(self), size):
            yield self.take(slice(start, start + size))

    @property
    def feed(self) -> dict[str, np.ndarray]:
        """The fields, and the labels under "label": the batch of a train program."""
        return dict(self.fields) if self.labels is None else {**self.fields, LABEL: self.labels}


def fixed_batch(model: Model) -> int | None:
    """The number of examples that every batch must have; None if the model takes any number."""
    return next((int(i.shape[0]) for i in model.inputs if i.shape and isinstance(i.shape[0], int)), None)


def out_of_range(what: str, array: np.ndarray, wrong: np.ndarray, known: int) -> CompressionError:
    """The error about the first element of `array` that is `wrong`, where numbers from 0 to below `known` are right."""
    place = tuple(np.argwhere(wrong)[0].tolist())
    return CompressionError(
        f"{what} of example {place[0]} has {array[place]}, and the model knows 0 to {known - 1}; "
        f"{int(wrong.sum())} of {wrong.size} numbers are wrong. Correct these examples or leave them out"
    )


def _check_indices(fields: Mapping[str, np.ndarray], model: Model, what: str) -> None:
    """Refuse numbers of tokens and the like beyond the model's tables: the run would end with an error of C++."""
    for value in model.ir.graph.inputs:
        array, bound = fields[str(value.name)], index_bound(value)
        if bound is not None and array.dtype.kind in "iu":
            # Negative indices count from the end.
            wrong = (array < -bound) | (array >= bound)
            if wrong.any():
                raise out_of_range(f"{what}: input {value.name!r}", array, wrong, bound)


def _by_name(data: Data, names: list[str], what: str) -> dict[str, np.ndarray]:
    if isinstance(data, Mapping):
        return name_entries(data, names, [LABEL])
    if isinstance(data, np.ndarray):
        return dict(zip(names, [data]))
    if not isinstance(data, Sequence) or isinstance(data, str):
        raise CompressionError(
            f"{what}: expected arrays by name, a tuple of arrays or one array, got {type(data).__name__}"
        )
    if len(data) not in (len(names), len(names) + 1):
        raise CompressionError(
            f"{what}: got {len(data)} arrays; the model has the inputs {names}, and labels may come last"
        )
    return dict(zip([*names, LABEL], data))


def _fitting(given: object, info: TensorInfo, what: str) -> np.ndarray:
    array = np.asarray(given)
    if array.dtype != info.dtype:
        if not np.can_cast(array.dtype, info.dtype, "same_kind"):
            raise CompressionError(f"{what}: input {info.name!r} takes {info.dtype}, got {array.dtype}")
        array = array.astype(info.dtype)
    expected = info.shape[1:]
    fits = array.ndim == len(info.shape) and all(
        not isinstance(want, int) or want == have for want, have in zip(expected, array.shape[1:])
    )
    if not fits:
        raise CompressionError(
            f"{what}: input {info.name!r} has the shape {list(info.shape)} with the examples first, got "
            f"{list(array.shape)}"
        )
    return array
