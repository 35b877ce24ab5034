"""Data sets of Hugging Face's `datasets`, which is not imported: they have `features`, and give Arrow tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipel.datasets.dataset import KINDS, Arrays, Field
from archipel.datasets.ragged import LENGTH, Ragged, stack
from archipel.datasets.readers.arrow_columns import field_of, is_text
from archipel.datasets.readers.arrow_fields import LENGTHS, decode_columns
from archipel.errors import DatasetError


def is_hugging_face(data: object) -> bool:
    """Whether it is a map-style data set of `datasets`."""
    return all(hasattr(data, name) for name in ("features", "with_format", "column_names", "__getitem__", "__len__"))


class HuggingFaceDataset:
    """The examples of a data set of Hugging Face.

    Numbers, bools and lists of them are read from its Arrow table, as `open_parquet` does; ClassLabel gives the names
    of classes. Arrays, pictures and sounds are decoded by `datasets`, and all must have the shape of the first.

    Raises DatasetError for columns that can be no field (texts: tokenize them, or take the column away with
    `remove_columns`), and, when they are taken, for rows without a value or of another shape.
    """

    def __init__(self, data: Any) -> None:
        self._count = len(data)
        self._decoded: list[str] = []
        fields: dict[str, Field] = {}
        schema = data.features.arrow_schema
        for name in data.column_names:
            kind, feature = schema.field(name).type, data.features[name]
            field = field_of(kind, tuple(getattr(feature, "names", None) or ()))
            if field is None and is_text(kind):
                raise DatasetError(
                    f"Hugging Face data set: column {name!r} has texts; tokenize them, or leave the column out: "
                    f"data.remove_columns({name!r})"
                )
            if field is None:
                field = self._look(data, name)
                self._decoded.append(name)
            fields[name] = field
            if field.shape[:1] == (None,):
                fields[name + LENGTH] = LENGTHS
        self.fields: Mapping[str, Field] = fields
        self._plain = [name for name in data.column_names if name not in self._decoded]
        self._tables: Any = data.select_columns(self._plain).with_format("arrow") if self._plain else None
        self._arrays: Any = data.select_columns(self._decoded).with_format("numpy") if self._decoded else None

    def __len__(self) -> int:
        return self._count

    def take(self, rows: NDArray[np.intp]) -> Arrays:
        """The examples of these numbers."""
        numbers = [int(row) for row in rows]
        taken: Arrays = {}
        if self._tables is not None and numbers:
            plain = {name: field for name, field in self.fields.items() if name not in self._decoded}
            try:
                columns = decode_columns(self._tables[numbers], plain, "Hugging Face data set", 0)
            except DatasetError:
                self._name_row(numbers, plain)
                raise
            for name, column in columns.items():
                if isinstance(column, Ragged):
                    column = stack(column[np.arange(len(numbers))], len(self.fields[name].shape), column.values.dtype)
                taken[name] = column
        for name in self._decoded:
            taken[name] = self._stack(name, numbers)
        return taken

    def locate(self, row: int) -> str:
        """The number of an example."""
        return f"Hugging Face data set, row {row}"

    def _stack(self, name: str, numbers: list[int]) -> NDArray[Any]:
        field = self.fields[name]
        examples = self._arrays[numbers][name] if numbers else []
        for row, example in zip(numbers, examples):
            array = np.asarray(example)
            if array.dtype != field.dtype or array.shape != field.shape:
                raise DatasetError(
                    f"{self.locate(row)}: column {name!r} is {array.dtype}{list(array.shape)}, but {field} in the "
                    "first row; bring all to one shape with map()"
                )
        return np.array(list(examples), field.dtype).reshape(len(numbers), *(size or 0 for size in field.shape))

    def _name_row(self, numbers: list[int], plain: Mapping[str, Field]) -> None:
        for row in numbers:
            decode_columns(self._tables[[row]], plain, "Hugging Face data set", row)

    def _look(self, data: Any, name: str) -> Field:
        if not self._count:
            raise DatasetError("Hugging Face data set: no rows; give one that has some")
        first = np.asarray(data.select_columns([name]).with_format("numpy")[0][name])
        if first.dtype.kind not in KINDS:
            raise DatasetError(
                f"Hugging Face data set: column {name!r} is {data.features[name]}, which can be no field; leave it "
                f"out: data.remove_columns({name!r})"
            )
        return Field(first.dtype, first.shape)
