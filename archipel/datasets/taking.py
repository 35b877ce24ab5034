"""Takes examples of a data set, and names the row where that fails."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from archipel.datasets.dataset import Arrays, Dataset, Field, Stream, locate
from archipel.datasets.order import in_pieces
from archipel.errors import ArchipelError, DatasetError
from archipel.library_errors import one_line

_PIECE_ELEMENTS = 1 << 20


def rows_a_piece(fields: Mapping[str, Field]) -> int:
    """How many examples make a piece of about a million numbers, 4096 at most."""
    elements = sum(math.prod(size or 1024 for size in field.shape) for field in fields.values())
    return max(1, min(4096, _PIECE_ELEMENTS // max(elements, 1)))


def pieces_of(data: Dataset | Stream, rows: int) -> Iterator[Arrays]:
    """All examples in their order, `rows` at a time."""
    if isinstance(data, Dataset):
        for start in range(0, len(data), rows):
            yield take(data, np.arange(start, min(start + rows, len(data))))
    else:
        yield from in_pieces(data.read(), rows)


def take(dataset: Dataset, rows: NDArray[np.intp]) -> Arrays:
    """The examples of these numbers, checked against the fields of the data set.

    Raises DatasetError: that of the data set, or one that names the first row that cannot be read.
    """
    if not len(rows):
        return {name: np.zeros((0, *(size or 0 for size in f.shape)), f.dtype) for name, f in dataset.fields.items()}
    try:
        batch = dataset.take(rows)
    except (ArchipelError, MemoryError):
        raise
    except Exception as error:
        raise DatasetError(
            f"{_first_unreadable(dataset, rows)}: {type(error).__name__}: {one_line(error)}; mend it or leave it out"
        ) from error
    for name, field in dataset.fields.items():
        array = batch.get(name)
        if array is None or len(array) != len(rows) or not field.fits(array):
            got = "nothing" if array is None else f"{array.dtype}{list(array.shape)}"
            raise DatasetError(
                f"{locate(dataset, int(rows[0]))} and others: field {name!r} is {field} for each of {len(rows)} "
                f"examples, but the data set gave {got}"
            )
    return batch


def some_examples(data: Dataset | Stream, count: int = 2) -> Arrays:
    """The first examples, or all where there are fewer; of a stream, those of its first piece at most."""
    if isinstance(data, Dataset):
        return take(data, np.arange(min(count, len(data)), dtype=np.intp))
    return {name: values[:count] for name, values in next(iter(data.read())).items()}


def _first_unreadable(dataset: Dataset, rows: NDArray[np.intp]) -> str:
    for row in rows:
        try:
            dataset.take(np.array([row], np.intp))
        except Exception:  # noqa: BLE001  (the caller raises the error; this finds the row that it is about)
            return locate(dataset, int(row))
    return f"rows {', '.join(map(str, rows[:4]))} ... together"
