"""What a data set is to everything that trains: named fields, and examples by number or one after the other.

Every reader gives one of the two. A `Dataset` knows how many examples it has and gives any of them; a `Stream` gives
them in its own order only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from archipel.errors import DatasetError

Arrays = dict[str, NDArray[Any]]
"""Examples by field: arrays `[examples, ...]`."""

INPUT, LABEL = "input", "label"
"""What the fields of `(inputs, labels)` are called."""

KINDS = "biuf"
"""The kinds of dtype (`numpy.dtype.kind`) that examples may have: bools, whole numbers, floats."""


@dataclass(frozen=True)
class Field:
    """One field of an example.

    dtype    bool, a whole number or a float
    shape    the shape of one example without the axis of examples; None for an axis of any size, of which all examples
             of a batch have the same, or are filled up to the same with zeros where the reader says so
    classes  the names of the labels 0, 1, ... where they have names

    Example:
        labels = Field(np.dtype("int64"), classes=("cat", "dog"))
        print(labels.fits(np.array([0, 1, 1])))  # True
    """

    dtype: np.dtype[Any]
    shape: tuple[int | None, ...] = ()
    classes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join('n' if size is None else str(size) for size in self.shape)}]"

    def fits(self, array: NDArray[Any]) -> bool:
        """Whether the array `[examples, ...]` has this dtype and shape."""
        sizes = array.shape[1:]
        return (
            array.dtype == self.dtype
            and array.ndim == 1 + len(self.shape)
            and all(wanted is None or wanted == size for wanted, size in zip(self.shape, sizes))
        )


@runtime_checkable
class Dataset(Protocol):
    """Examples by number, 0 ... len - 1.

    A data set may have more, which is used where it is there:
        locate(row) -> str: where an example comes from, for errors, such as "train.csv, line 18".
        blocks: whole numbers `[k + 1]` from 0 to len; reading the rows from one to the next together is cheap, and
            reading single rows of many blocks is not. Shuffling then keeps to some blocks at a time.
        window: how many blocks it can hold in memory; 8 if it does not say.

    Example:
        class Squares:
            fields = {"input": Field(np.dtype("float32"), (1,))}

            def __len__(self):
                return 1000

            def take(self, rows):
                return {"input": np.float32(rows[:, None] ** 2)}

        for batch in Batches(Squares(), 100):
            print(batch["input"].shape)  # (100, 1)
    """

    @property
    def fields(self) -> Mapping[str, Field]:
        """The fields by name."""
        ...

    def __len__(self) -> int: ...

    def take(self, rows: NDArray[np.intp]) -> Arrays:
        """The examples of these numbers `[m]`, in this order: an array `[m, ...]` for each field.

        Several threads may call it at the same time. Raises DatasetError, which names file and row.
        """
        ...


@runtime_checkable
class Stream(Protocol):
    """Examples one after the other, of which nobody may know how many there are.

    `locate(row)` is used where it is there, as in a `Dataset`.

    Example: see `archipel.datasets.CsvStream`.
    """

    @property
    def fields(self) -> Mapping[str, Field]:
        """The fields by name."""
        ...

    def read(self, start: int = 0) -> Iterator[Arrays]:
        """The examples from number `start` on, in pieces of any size: an array `[m, ...]` for each field.

        Every call begins anew and gives the same examples. Raises DatasetError, which names file and row.
        """
        ...


class ArrayDataset:
    """Arrays in memory or memory-mapped files, the first axis of each the examples.

    Arguments:
        arrays: an array `[examples, ...]` for each field.
        classes: the names of the labels of a field, where they have names.
        name: what errors call it, such as a file's name.

    Raises DatasetError for arrays of other elements than numbers and bools, or of different lengths.

    Example:
        data = ArrayDataset({"input": x, "label": y}, classes={"label": ("cat", "dog")})
    """

    def __init__(
        self, arrays: Mapping[str, Any], *, classes: Mapping[str, Sequence[str]] | None = None, name: str = "the arrays"
    ) -> None:
        self.name = name
        self.arrays: Arrays = {field: _as_array(name, field, array) for field, array in arrays.items()}
        names = {field: tuple(known) for field, known in (classes or {}).items()}
        if not self.arrays:
            raise DatasetError(f"{name}: no arrays; give one for each field, such as {{'input': x, 'label': y}}")
        if unknown := sorted(set(names) - set(self.arrays)):
            raise DatasetError(f"{name}: classes for {unknown[0]!r}, but the fields are {', '.join(self.arrays)}")
        lengths = {field: len(array) for field, array in self.arrays.items()}
        if len(set(lengths.values())) > 1:
            sizes = ", ".join(f"{field} {length}" for field, length in lengths.items())
            raise DatasetError(f"{name}: the fields have different numbers of examples ({sizes}); make them the same")
        self._length = next(iter(lengths.values()))
        self.fields: Mapping[str, Field] = {
            field: Field(array.dtype.newbyteorder("="), array.shape[1:], names.get(field, ()))
            for field, array in self.arrays.items()
        }

    def __len__(self) -> int:
        return self._length

    def take(self, rows: NDArray[np.intp]) -> Arrays:
        """The examples of these numbers, as copies in the machine's byte order."""
        return {
            field: np.ascontiguousarray(array[rows], array.dtype.newbyteorder("="))
            for field, array in self.arrays.items()
        }

    def locate(self, row: int) -> str:
        """Where an example comes from."""
        return f"{self.name}, row {row}"


class Subset:
    """The examples of a data set at these numbers, in this order.

    Arguments:
        dataset: the data set.
        rows: whole numbers `[m]` from 0 to below its length; they may repeat.

    Raises DatasetError for a number out of range.

    Example:
        first = Subset(as_dataset((x, y)), range(100))
        print(len(first))  # 100
    """

    def __init__(self, dataset: Dataset, rows: NDArray[np.integer[Any]] | Sequence[int]) -> None:
        chosen = np.asarray(rows)
        if chosen.size == 0:
            chosen = chosen.astype(np.intp)
        if chosen.ndim != 1 or chosen.dtype.kind not in "iu":
            raise DatasetError(f"rows must be whole numbers [m], got {chosen.dtype}{list(chosen.shape)}")
        if chosen.size and not 0 <= chosen.min() <= chosen.max() < len(dataset):
            raise DatasetError(f"rows {chosen.min()}..{chosen.max()} of a data set of {len(dataset)} examples")
        self.dataset, self.rows = dataset, chosen.astype(np.intp)
        self.fields = dataset.fields
        blocks = getattr(dataset, "blocks", None)
        # Where the order is kept, the chosen rows of a block follow each other.
        ascends = blocks is not None and bool((np.diff(self.rows) >= 0).all())
        self.blocks = np.searchsorted(self.rows, blocks) if ascends and blocks is not None else None
        self.window = getattr(dataset, "window", 0)

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, rows: NDArray[np.intp]) -> Arrays:
        """The examples of these numbers among the chosen ones."""
        return self.dataset.take(self.rows[rows])

    def locate(self, row: int) -> str:
        """Where an example comes from."""
        return locate(self.dataset, int(self.rows[row]))


def locate(data: object, row: int) -> str:
    """Where example `row` of a data set or stream comes from, in words: "row 18" where it does not say more."""
    own = getattr(data, "locate", None)
    return str(own(row)) if callable(own) else f"row {row}"


def _as_array(name: str, field: str, values: Any) -> NDArray[Any]:
    array = values if isinstance(values, np.ndarray) else np.asarray(values)
    if not field or not isinstance(field, str):
        raise DatasetError(f"{name}: a field is called {field!r}; expected a text that is not empty")
    if array.dtype.kind not in KINDS and array.dtype.name != "bfloat16":
        raise DatasetError(f"{name}: field {field!r} has {array.dtype} elements; expected numbers or bools")
    if array.ndim == 0:
        raise DatasetError(f"{name}: field {field!r} is a single number; its first axis must be the examples")
    return array
