"""Arrow IPC files (`.arrow`, `.feather`), both forms of them: record batches that are mapped into memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from archipel.datasets.readers.arrow_fields import decode_columns, read_fields
from archipel.datasets.readers.blocks import MEMORY, Block, BlockDataset
from archipel.datasets.readers.extra import arrow_errors, need
from archipel.datasets.readers.schema import bytes_of
from archipel.errors import DatasetError
from archipel.library_errors import one_line

_FILE = b"ARROW1"


def open_arrow(
    path: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    classes: Mapping[str, Sequence[str]] | None = None,
    memory: int = MEMORY,
) -> ArrowDataset:
    """The examples of an Arrow IPC file, or of its stream form, which Hugging Face's `datasets` keeps on the disk.

    The file is mapped, so it may be larger than memory; buffers that are compressed are unpacked when they are needed.
    Fields, arguments and errors are those of `open_parquet`.

    Example:
        data = open_arrow("train.arrow")
    """
    return ArrowDataset(Path(path), columns, classes or {}, memory)


class ArrowDataset(BlockDataset):
    """The examples of an Arrow file; `open_arrow` makes one."""

    def __init__(
        self, path: Path, columns: Sequence[str] | None, classes: Mapping[str, Sequence[str]], memory: int
    ) -> None:
        self.path = path
        self._source: Any = None
        source = self._open()
        counts = [self._batch(block).num_rows for block in range(source[1])]
        fields, self._columns = read_fields(
            path, source[0], columns, classes,
            lambda name: [self._batch(block).column(name) for block in range(source[1])],
        )  # fmt: skip
        wide = max(counts, default=0) * sum(bytes_of(field) for field in fields.values())
        super().__init__(fields, counts, wide, memory)

    def locate(self, row: int) -> str:
        """The file, and the row in it from 0."""
        return f"{self.path}, row {row}"

    def _open(self) -> tuple[Any, int, Any]:
        """The schema, the number of record batches, and what gives a batch by number."""
        if self._source is None:
            pa = need("pyarrow")
            try:
                file = pa.memory_map(str(self.path))
                start = file.read(len(_FILE))
                file.seek(0)
                if start == _FILE:
                    reader = pa.ipc.open_file(file)
                    self._source = reader.schema, reader.num_record_batches, reader.get_batch
                else:
                    # Nothing says where its batches begin, so it is gone through once. What is mapped takes no memory.
                    batches = list(pa.ipc.open_stream(file))
                    schema = batches[0].schema if batches else pa.schema([])
                    self._source = schema, len(batches), batches.__getitem__
            except FileNotFoundError:
                raise DatasetError(f"{self.path}: No such file; give an Arrow file") from None
            except arrow_errors() as error:
                raise DatasetError(f"{self.path}: {one_line(error)}; make the file again") from None
        source: tuple[Any, int, Any] = self._source
        return source

    def _batch(self, block: int) -> Any:
        try:
            batch = self._open()[2](block)
            # Offsets in a damaged file would point anywhere.
            batch.validate(full=True)
        except arrow_errors() as error:
            raise DatasetError(f"{self.path}: record batch {block}: {one_line(error)}; make the file again") from None
        return batch

    def _read_block(self, block: int) -> Block:
        return decode_columns(self._batch(block), self.fields, str(self.path), int(self.blocks[block]))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_source": None}
