"""Parquet files, one or a folder of them, read a row group at a time: record files of archipel and others' tables."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archipel.datasets.dataset import Field
from archipel.datasets.readers.arrow_fields import decode_columns, read_fields
from archipel.datasets.readers.blocks import MEMORY, Block, BlockDataset
from archipel.datasets.readers.extra import arrow_errors, need
from archipel.datasets.readers.schema import bytes_of
from archipel.errors import DatasetError
from archipel.library_errors import one_line

if TYPE_CHECKING:
    import pyarrow as pa

MAX_FOOTER_BYTES = 64 << 20
MAX_GROUP_BYTES = 1 << 30


def open_parquet(
    path: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    classes: Mapping[str, Sequence[str]] | None = None,
    memory: int = MEMORY,
) -> ParquetDataset:
    """The examples of a Parquet file, or of all `*.parquet` in a folder in the order of their names.

    Reads row groups when they are needed, so that files may be larger than memory. Files that `write_records` made have
    the fields that were written. In others each column is a field: numbers and bools, lists of them (fixed-size lists
    have an axis of that size, other lists one of any size: shorter examples are filled up with zeros, and the field
    `NAME_length` has their lengths), and texts as numbers of classes.

    Arguments:
        path: the file or folder.
        columns: the columns to read; all by default.
        classes: the names of the labels 0, 1, ... of text columns; by default all texts of the column, sorted.
        memory: bytes for decoded row groups; at least two row groups are held.

    Raises DatasetError for a file that cannot be read, a column that is missing or can be no field, and, when they are
    taken, for rows without a value; MissingExtraError without pyarrow.

    Example:
        data = open_parquet("train.parquet")
        for batch in Batches(data, 32): ...
    """
    return ParquetDataset(Path(path), columns, classes or {}, memory)


class ParquetDataset(BlockDataset):
    """The examples of Parquet files; `open_parquet` makes one."""

    def __init__(
        self, path: Path, columns: Sequence[str] | None, classes: Mapping[str, Sequence[str]], memory: int
    ) -> None:
        self.path = path
        self._paths = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
        if not self._paths:
            raise DatasetError(f"{path}: no *.parquet in this folder; give another, or `archipel data convert` to it")
        self._files: dict[int, Any] = {}
        fields, self._columns = self._read_fields(columns, classes)
        self._places: list[tuple[int, int]] = []
        self._first_rows: list[int] = []
        sizes: list[int] = []
        largest = 1
        for number, file in enumerate(self._paths):
            first = 0
            metadata = self._open(number).metadata
            for group in range(metadata.num_row_groups):
                facts = metadata.row_group(group)
                # A few bytes can stand for any number of equal rows.
                wide = facts.num_rows * sum(bytes_of(field) for field in fields.values())
                size = max(facts.total_byte_size, wide)
                if facts.total_byte_size < 0 or facts.num_rows < 0 or size > MAX_GROUP_BYTES:
                    raise DatasetError(
                        f"{file}: row group {group} takes {size} bytes, the limit is {MAX_GROUP_BYTES}; write it again "
                        "with smaller row groups"
                    )
                largest = max(largest, size)
                self._places.append((number, group))
                self._first_rows.append(first)
                sizes.append(facts.num_rows)
                first += facts.num_rows
        super().__init__(fields, sizes, largest, memory)

    def locate(self, row: int) -> str:
        """The file, and the row in it from 0."""
        block = int(self.blocks.searchsorted(row, side="right")) - 1
        return f"{self._paths[self._places[block][0]]}, row {row - int(self.blocks[block]) + self._first_rows[block]}"

    def _read_fields(
        self, columns: Sequence[str] | None, classes: Mapping[str, Sequence[str]]
    ) -> tuple[dict[str, Field], list[str]]:
        first, schema = self._paths[0], self._open(0).schema_arrow
        fields, names = read_fields(
            first, schema, columns, classes,
            lambda name: [self._column(number, name) for number in range(len(self._paths))],
        )  # fmt: skip
        for number, file in enumerate(self._paths[1:], 1):
            other = self._open(number).schema_arrow
            if any(name not in other.names or other.field(name).type != schema.field(name).type for name in names):
                raise DatasetError(f"{file}: other columns than {first.name}; put files of one kind into a folder")
        return fields, names

    def _column(self, number: int, name: str) -> pa.ChunkedArray:
        try:
            return self._open(number).read([name]).column(0)
        except arrow_errors() as error:
            raise DatasetError(f"{self._paths[number]}: {one_line(error)}; make the file again") from None

    def _open(self, number: int) -> Any:
        if number not in self._files:
            if len(self._files) >= 64:
                self._files.pop(next(iter(self._files)))
            self._files[number] = open_file(self._paths[number])
        return self._files[number]

    def _read_block(self, block: int) -> Block:
        number, group = self._places[block]
        path = self._paths[number]
        try:
            table = self._open(number).read_row_group(group, columns=self._columns)
            table.validate(full=True)
        except arrow_errors() as error:
            raise DatasetError(f"{path}: row group {group}: {one_line(error)}; make the file again") from None
        if table.num_rows != self.blocks[block + 1] - self.blocks[block]:
            raise DatasetError(f"{path}: row group {group} has {table.num_rows} rows, not as many as it says")
        return decode_columns(table, self.fields, str(path), self._first_rows[block])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_files": {}}


def open_file(path: Path) -> Any:
    """The pyarrow.parquet.ParquetFile. Raises DatasetError for a file that is missing, damaged or has a huge footer."""
    pq = need("pyarrow.parquet")
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 8, 0))
            end = file.read(8)
        footer = int.from_bytes(end[:4], "little")
        if size < 12 or end[4:] != b"PAR1" or footer > size - 12:
            raise DatasetError(f"{path}: not a Parquet file, or cut short; make it again")
        if footer > MAX_FOOTER_BYTES:
            raise DatasetError(f"{path}: a footer of {footer} bytes, the limit is {MAX_FOOTER_BYTES}; split the file")
        return pq.ParquetFile(
            path, memory_map=False, thrift_string_size_limit=MAX_FOOTER_BYTES, thrift_container_size_limit=1_000_000
        )
    except DatasetError:
        raise
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror or one_line(error)}; give a Parquet file") from None
    except arrow_errors() as error:
        raise DatasetError(f"{path}: {one_line(error)}; make the file again") from None
