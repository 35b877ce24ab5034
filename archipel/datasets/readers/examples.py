"""Data sets of single examples: PyTorch's, lists, and whatever else is indexed or iterated. PyTorch is not imported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipel.datasets.dataset import INPUT, KINDS, LABEL, Arrays, Field
from archipel.errors import ArchipelError, DatasetError
from archipel.library_errors import one_line

_PIECE = 64


def is_indexed(data: object) -> bool:
    """Whether it has examples by number, as PyTorch's map-style data sets and lists have."""
    # PyTorch's IterableDataset has a `__getitem__` that only raises, and may have a length.
    iterable = any(kind.__name__ == "IterableDataset" for kind in type(data).__mro__)
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not iterable


class IndexedExamples:
    """Examples by number, of any object with a length that is indexed with whole numbers.

    An example is a dict (its keys are the fields), a pair ("input" and "label"), or one value ("input"). A value is an
    array, a tensor, a picture of Pillow, a number or a list of numbers; Python's floats become float32.
    All examples must have the dtypes and shapes of the first. The labels of a pair have the names in `data.classes`,
    as torchvision's data sets have them, and those of a dict the names in `data.features`, as Hugging Face's have them.

    Raises DatasetError, which names the example's number, for one that is different or cannot be read.
    """

    def __init__(self, data: Any) -> None:
        self.data, self._name = data, type(data).__name__
        self._count = len(data)
        if not self._count:
            raise DatasetError(f"{self._name}: no examples; give a data set that has some")
        first = _as_arrays(self._get(0), f"{self._name}, example 0")
        self.fields: Mapping[str, Field] = _fields(data, first)

    def __len__(self) -> int:
        return self._count

    def take(self, rows: NDArray[np.intp]) -> Arrays:
        """The examples of these numbers."""
        numbers = [int(row) for row in rows]
        # PyTorch's own loader asks for all at once where a data set offers that.
        several = getattr(self.data, "__getitems__", None)
        examples = several(numbers) if callable(several) else [self._get(row) for row in numbers]
        return stack_examples(examples, self.fields, [self.locate(row) for row in numbers])

    def locate(self, row: int) -> str:
        """The number of an example."""
        return f"{self._name}, example {row}"

    def _get(self, row: int) -> Any:
        try:
            return self.data[row]
        except (ArchipelError, MemoryError):
            raise
        except Exception as error:
            raise _damaged(self.locate(row), error) from error


class IteratedExamples:
    """Examples one after the other, of anything that can be iterated again and again; as `IndexedExamples`.

    A resumed iteration begins at the first example and passes over those that it has had.
    """

    def __init__(self, data: Iterable[Any]) -> None:
        self.data, self._name = data, type(data).__name__
        if hasattr(data, "batch_sampler") and hasattr(data, "dataset"):
            # PyTorch's, whose batches would be taken for examples.
            raise DatasetError(f"{self._name}: it makes batches, and examples are needed; give its .dataset")
        if isinstance(data, Iterator):
            raise DatasetError(
                f"{self._name}: it can be iterated once only; give an object whose __iter__ begins anew, or a list"
            )
        first = next(self._examples(), None)
        if first is None:
            raise DatasetError(f"{self._name}: no examples; give a data set that has some")
        arrays = _as_arrays(first, f"{self._name}, example 0")
        self.fields: Mapping[str, Field] = _fields(data, arrays)

    def read(self, start: int = 0) -> Iterator[Arrays]:
        """The examples from number `start` on."""
        waiting: list[Any] = []
        for row, example in enumerate(self._examples()):
            if row < start:
                continue
            waiting.append(example)
            if len(waiting) == _PIECE:
                yield self._stack(waiting, row + 1)
                waiting = []
        if waiting:
            yield self._stack(waiting, row + 1)

    def locate(self, row: int) -> str:
        """The number of an example."""
        return f"{self._name}, example {row}"

    def _stack(self, examples: list[Any], stop: int) -> Arrays:
        return stack_examples(examples, self.fields, [self.locate(row) for row in range(stop - len(examples), stop)])

    def _examples(self) -> Iterator[Any]:
        row = 0
        try:
            for example in self.data:
                yield example
                row += 1
        except (ArchipelError, MemoryError):
            raise
        except Exception as error:
            raise _damaged(self.locate(row), error) from error


def _damaged(where: str, error: Exception) -> DatasetError:
    return DatasetError(f"{where}: {type(error).__name__}: {one_line(error)}; mend it or leave it out")


def stack_examples(examples: Sequence[Any], fields: Mapping[str, Field], where: Sequence[str]) -> Arrays:
    """Examples as arrays `[examples, ...]`. Raises DatasetError, which names the place of one that does not fit."""
    columns: dict[str, list[NDArray[Any]]] = {name: [] for name in fields}
    for example, place in zip(examples, where, strict=True):
        arrays = _as_arrays(example, place)
        if set(arrays) != set(fields):
            raise DatasetError(
                f"{place}: the fields {', '.join(arrays)}, but the first example has {', '.join(fields)}; "
                "give each example the same"
            )
        for name, array in arrays.items():
            field = fields[name]
            if array.dtype != field.dtype or array.shape != field.shape:
                raise DatasetError(
                    f"{place}: field {name!r} is {array.dtype}{list(array.shape)}, but {field} in the first example; "
                    "bring all to one dtype and shape"
                )
            columns[name].append(array)
    return {
        name: np.stack(arrays) if arrays else np.zeros((0, *(size or 0 for size in fields[name].shape)))
        for name, arrays in columns.items()
    }


def _fields(data: object, first: Arrays) -> dict[str, Field]:
    features = getattr(data, "features", None)
    names = {name: getattr(feature, "names", None) for name, feature in features.items()} if features else {}
    names.setdefault(LABEL, getattr(data, "classes", None))
    fields = {}
    for name, array in first.items():
        known = names.get(name)
        labels = (
            isinstance(known, Sequence) and all(isinstance(each, str) for each in known) and array.dtype.kind in "iu"
        )
        fields[name] = Field(array.dtype, array.shape, tuple(known) if labels and known and not array.shape else ())
    return fields


def _as_arrays(example: Any, where: str) -> Arrays:
    if isinstance(example, Mapping):
        values = dict(example)
    elif isinstance(example, tuple | list) and len(example) == 2:
        values = {INPUT: example[0], LABEL: example[1]}
    elif isinstance(example, tuple | list):
        raise DatasetError(
            f"{where}: {len(example)} values; give a pair (input, label), or a dict with a name for each"
        )
    else:
        values = {INPUT: example}
    return {str(name): _as_array(value, f"{where}: field {str(name)!r}") for name, value in values.items()}


def _as_array(value: Any, what: str) -> NDArray[Any]:
    # A tensor that needs a gradient or is on another device refuses to become an array by itself.
    value = value.detach().cpu() if hasattr(value, "detach") else value
    array = np.asarray(value)
    if isinstance(value, float | list | tuple) and array.dtype == np.float64:
        array = array.astype(np.float32)
    if array.dtype.kind not in KINDS:
        raise DatasetError(f"{what} is {type(value).__name__}; expected an array, a tensor or a number")
    return array.astype(array.dtype.newbyteorder("="), copy=False)
