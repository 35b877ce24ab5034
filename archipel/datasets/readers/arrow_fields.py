"""The fields of a table by its Arrow schema, and by archipel's own where the file has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from archipel.datasets.dataset import Field
from archipel.datasets.ragged import LENGTH, Ragged
from archipel.datasets.readers.arrow_columns import RowsError, class_names, field_of, is_text, to_numpy
from archipel.datasets.readers.blocks import Block
from archipel.datasets.readers.extra import arrow_errors, need
from archipel.datasets.readers.schema import KEY, bytes_of, decode_schema
from archipel.errors import DatasetError
from archipel.library_errors import one_line

if TYPE_CHECKING:
    import pyarrow as pa

LENGTHS = Field(np.dtype(np.int64))


def read_fields(
    path: Path,
    schema: pa.Schema,
    columns: Sequence[str] | None,
    classes: Mapping[str, Sequence[str]],
    texts: Callable[[str], list[pa.ChunkedArray]],
) -> tuple[dict[str, Field], list[str]]:
    """The fields of a file with this schema, and the columns that they are read from.

    Arguments:
        path: the file, for errors.
        schema: of the file.
        columns: the columns that are wanted; all by default.
        classes: the names of the labels of text columns.
        texts: reads a column of texts, for the names of its classes.

    Raises DatasetError for a column that is missing, that can be no field, or that is not as archipel's schema says.
    """
    try:
        return _read_fields(path, schema, columns, classes, texts)
    except DatasetError:
        raise
    except arrow_errors() as error:  # such as names and texts that are no UTF-8
        raise DatasetError(f"{path}: {one_line(error)}; make the file again") from None


def _read_fields(
    path: Path,
    schema: pa.Schema,
    columns: Sequence[str] | None,
    classes: Mapping[str, Sequence[str]],
    texts: Callable[[str], list[pa.ChunkedArray]],
) -> tuple[dict[str, Field], list[str]]:
    names = list(schema.names) if columns is None else list(columns)
    check_columns(path, schema.names, [*names, *classes])
    metadata = schema.metadata or {}
    recorded = decode_schema(metadata[KEY], str(path)) if KEY in metadata else {}
    fields: dict[str, Field] = {}
    for name in names:
        kind, known = schema.field(name).type, list(classes.get(name, ()))
        if name in recorded:
            field: Field | None = recorded[name]
            if not _holds(kind, recorded[name]):
                raise DatasetError(
                    f"{path}: column {name!r} is {kind}, but archipel's schema says {field}; convert the data again"
                )
        else:
            if is_text(kind) and not known:
                known = class_names(texts(name))
            field = field_of(kind, known)
        if field is None:
            raise DatasetError(
                f"{path}: column {name!r} is {kind}, which can be no field; leave it out with columns=[...]"
            )
        fields[name] = field
        if field.shape[:1] == (None,):
            fields[name + LENGTH] = LENGTHS
    return fields, names


def check_columns(path: Path, there: Sequence[str], wanted: Sequence[str]) -> None:
    """Raise DatasetError for a wanted column that is not there, or that is there twice."""
    for name in wanted:
        if there.count(name) != 1:
            what = "no column" if name not in there else "two columns"
            known = ", ".join(map(repr, there[:12])) + (", ..." if len(there) > 12 else "")
            raise DatasetError(f"{path}: {what} {name!r}; it has {known}")


def decode_columns(table: Any, fields: Mapping[str, Field], where: str, first: int) -> Block:
    """The fields of a table or record batch, of which the first row is row `first` of the file `where`.

    Raises DatasetError, which names file, row and column.
    """
    made: dict[str, Any] = {}
    for name, field in fields.items():
        if name in made:
            continue
        try:
            made[name] = column = to_numpy(table.column(name), field)
        except RowsError as error:
            more = f" (and {len(error.rows) - 1} more rows)" if len(error.rows) > 1 else ""
            raise DatasetError(
                f"{where}, row {first + error.rows[0]}: column {name!r}: {error.what}{more}; {error.remedy}"
            ) from None
        except DatasetError as error:
            raise DatasetError(f"{where}: column {name!r}: {error}") from None
        except arrow_errors() as error:
            raise DatasetError(f"{where}: column {name!r}: {one_line(error)}; make the file again") from None
        if isinstance(column, Ragged):
            made[name + LENGTH] = column.lengths
    return made


def _holds(kind: pa.DataType, field: Field) -> bool:
    """Whether a column of this type is what `write_records` writes for the field."""
    pa = need("pyarrow")
    if not field.shape:
        return bool(kind == pa.from_numpy_dtype(field.dtype))
    if field.shape[0] is None:
        return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))
    return bool(pa.types.is_fixed_size_binary(kind) and kind.byte_width == bytes_of(field))
