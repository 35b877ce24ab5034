"""Writes data sets as record files: Parquet with the fields in its metadata (`schema.py` has the format)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from archipel.datasets.dataset import Field
from archipel.datasets.opening import as_dataset
from archipel.datasets.order import count_of
from archipel.datasets.ragged import LENGTH
from archipel.datasets.readers.extra import need
from archipel.datasets.readers.schema import KEY, bytes_of, encode_schema
from archipel.datasets.taking import pieces_of
from archipel.durable import replacing
from archipel.errors import DatasetError

GROUP_BYTES = 8 << 20


def write_records(
    data: object,
    path: str | os.PathLike[str],
    *,
    compression: str = "zstd",
    group_bytes: int = GROUP_BYTES,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Write a data set or stream as a record file, which `open_parquet` opens without loss.

    Arguments:
        data: anything that `as_dataset` takes.
        path: the file; a kill leaves the old one or the whole new one.
        compression: "zstd", "lz4", "snappy", "gzip" or "none".
        group_bytes: about how many bytes a row group has. Shuffling holds some groups in memory, and small ones cost
            time.
        progress: called with the number of examples written so far.

    Returns the number of examples. Raises DatasetError for examples that cannot be read or written, MissingExtraError
    without pyarrow, OSError.

    Example:
        write_records({"input": images, "label": labels}, "train.parquet")
    """
    pa, pq = need("pyarrow"), need("pyarrow.parquet")
    dataset = as_dataset(data)
    fields = {name: field for name, field in dataset.fields.items() if not _is_length(name, dataset.fields)}
    schema = _arrow_schema(fields)
    rows = max(1, group_bytes // max(sum(map(bytes_of, fields.values())), 1))
    written = 0
    with replacing(Path(path), mode=0o644) as file:
        with pq.ParquetWriter(
            file, schema, compression=compression, use_dictionary=False, write_statistics=False
        ) as writer:
            for piece in pieces_of(dataset, rows):
                columns = [_to_arrow(piece[name], field, piece.get(name + LENGTH)) for name, field in fields.items()]
                writer.write_table(pa.Table.from_arrays(columns, schema=schema), row_group_size=rows)
                written += count_of(piece)
                if progress:
                    progress(written)
        # Inside, so that the file that was there before stays.
        if not written:
            raise DatasetError(f"{path}: there are no examples to write; look at the source")
    return written


def _is_length(name: str, fields: Any) -> bool:
    return name.endswith(LENGTH) and fields.get(name.removesuffix(LENGTH), Field(np.dtype(bool))).shape[:1] == (None,)


def _arrow_schema(fields: dict[str, Field]) -> Any:
    pa = need("pyarrow")
    metadata = {KEY: encode_schema(fields)}
    columns = []
    for name, field in fields.items():
        if not field.shape:
            kind = pa.from_numpy_dtype(field.dtype)
        else:
            kind = pa.large_binary() if field.shape[0] is None else pa.binary(bytes_of(field))
        columns.append(pa.field(name, kind, nullable=False))
    return pa.schema(columns, metadata=metadata)


def _to_arrow(array: np.ndarray, field: Field, lengths: np.ndarray | None) -> Any:
    pa = need("pyarrow")
    if not field.shape:
        return pa.array(array)
    little = np.ascontiguousarray(array, field.dtype.newbyteorder("<"))
    if field.shape[0] is not None:
        return pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(bytes_of(field)), len(array), [None, pa.py_buffer(little)]
        )
    counts = np.full(len(array), array.shape[1]) if lengths is None else lengths
    return pa.array([example[:count].tobytes() for example, count in zip(little, counts)], pa.large_binary())
