"""A site's own examples: files and folders of tables, pictures or sounds, and what a query of its database answers.

The names in a table are the owner's, and those of a model's inputs the publisher's; `fields` in [examples] says which
columns are which. Text is a class's name, whose number has to be the same at every site, so `classes` lists the names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from archipel.client.settings import ExampleSettings
from archipel.errors import CommandError, MissingExtraError
from archipel.library_errors import one_line

Arrays = dict[str, np.ndarray]
_CSV = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
ROWS = 1000
"""Rows of an answer that are fetched together."""


def read_table(settings: ExampleSettings, limit_bytes: int) -> Arrays:
    """The columns of the file, folder or query in the settings, arranged as fields: numbers are float32 or int64.

    Raises CommandError, which names the file or query, the column and the row; DatasetError as readers of files do; and
    MissingExtraError where a package is missing.
    """
    if settings.database:
        where, columns = "the query in [examples]", read_query(settings, limit_bytes)
    else:
        where, columns = settings.file, read_file(Path(settings.file), settings)
    return arrange(columns, settings.fields, where)


def read_file(path: Path, settings: ExampleSettings) -> Arrays:
    """The columns of a file or folder that `archipel.datasets.open_file` opens, of a table those in `fields` alone."""
    # Imports what reads pictures and tables, which a device with arrays has no use for.
    from archipel.datasets.opening import open_file
    from archipel.datasets.reading import read_arrays

    options: dict[str, Any] = {"classes": settings.classes} if settings.classes else {}
    needed = dict.fromkeys(column for columns in settings.fields.values() for column in columns)
    if path.name.lower().endswith(_CSV):
        options["fields"] = {column: column for column in needed} if needed else "columns"
    elif needed and (path.suffix == ".parquet" or next(path.glob("*.parquet"), None)):
        options["columns"] = list(needed)
    return read_arrays(open_file(path, **options))


def read_query(settings: ExampleSettings, limit_bytes: int) -> Arrays:
    """The columns of the answer to the query, which changes nothing: its transaction is rolled back."""
    try:
        import sqlalchemy as sql
    except ModuleNotFoundError:
        raise MissingExtraError("sqlalchemy", "site") from None

    try:
        engine = sql.create_engine(settings.database)
    except (sql.exc.ArgumentError, ModuleNotFoundError) as error:
        # Its text may have the URL, and in that a password.
        why = f"needs the package {error.name}" if isinstance(error, ModuleNotFoundError) else "is no URL of a database"
        raise CommandError(f"examples.database {why}; give one such as postgresql+psycopg://user@host/name") from None
    shown = engine.url.render_as_string(hide_password=True)
    try:
        with engine.connect() as connection:
            answer = connection.execution_options(stream_results=True).execute(sql.text(settings.query))
            if not answer.returns_rows:
                raise CommandError(f"{shown}: the query in [examples] answers no rows; it has to be a SELECT")
            return to_columns(list(answer.keys()), answer.partitions(ROWS), settings.classes, limit_bytes)
    except sql.exc.SQLAlchemyError as error:
        raise CommandError(f"{shown}: {one_line(getattr(error, 'orig', None) or error)}") from None
    finally:
        engine.dispose()


def to_columns(
    names: Sequence[str], parts: Iterator[Sequence[Any]], classes: Mapping[str, Sequence[str]], limit_bytes: int
) -> Arrays:
    """The rows of an answer by column. Raises CommandError for a value that is no number, and beyond `limit_bytes`."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise CommandError(f"the query in [examples] has two columns {twice[0]!r}; rename one with AS")
    numbers = {name: {text: number for number, text in enumerate(each)} for name, each in classes.items()}
    if unknown := sorted(set(numbers) - set(names)):
        raise CommandError(f"examples.classes: the query has no column {unknown[0]!r}; it has {', '.join(names)}")
    pieces: dict[str, list[np.ndarray]] = {name: [] for name in names}
    count = size = 0
    for rows in parts:
        for place, name in enumerate(names):
            values = [_number(row[place], name, count + n, numbers.get(name)) for n, row in enumerate(rows)]
            try:
                piece = np.array(values)
            except ValueError:
                raise CommandError(f"column {name!r} of the query: lists of different lengths") from None
            pieces[name].append(piece.astype(np.int64 if piece.dtype.kind in "iu" else np.float32)
                                if piece.dtype.kind != "b" else piece)  # fmt: skip
            size += pieces[name][-1].nbytes
        count += len(rows)
        if size > limit_bytes:
            raise CommandError(
                f"the query in [examples] answers more than {limit_bytes} bytes (max_peak_bytes); limit its rows"
            )
    if not count:
        raise CommandError("the query in [examples] answers no rows")
    return {name: np.concatenate(each) for name, each in pieces.items()}


def _number(value: Any, column: str, row: int, classes: Mapping[str, int] | None) -> Any:
    where = f"column {column!r} of the query, row {row + 1}"
    if value is None:
        raise CommandError(f"{where}: no value; leave such rows out with WHERE {column} IS NOT NULL")
    if isinstance(value, str):
        if classes is None:
            raise CommandError(f"{where}: the text {value[:40]!r}; list the names of its classes in [examples.classes]")
        if value not in classes:
            raise CommandError(f"{where}: {value[:40]!r} is none of the classes {', '.join(classes)}")
        return classes[value]
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, bool | int | float | list | tuple):
        return value
    raise CommandError(f"{where}: a {type(value).__name__}, which is no number; convert it with CAST")


def arrange(columns: Arrays, fields: Mapping[str, Sequence[str]], where: str) -> Arrays:
    """The fields of the examples: each is one column, or several beside each other, `[examples, columns]`.

    Without `fields` every column is a field. Raises CommandError for a column that there is not, and for columns that
    have not the same shape.
    """
    made: Arrays = {}
    for field, names in (fields or {name: (name,) for name in columns}).items():
        if missing := [name for name in names if name not in columns]:
            raise CommandError(f"examples.fields: {where} has no column {missing[0]!r}; it has {', '.join(columns)}")
        parts = [_plain(columns[name]) for name in names]
        if len(parts) == 1:
            made[field] = parts[0]
            continue
        try:
            # Of numbers with and without a point all have one.
            made[field] = _plain(np.stack(parts, axis=1))
        except ValueError:
            shapes = ", ".join(f"{name} {list(part.shape)}" for name, part in zip(names, parts, strict=True))
            raise CommandError(f"examples.fields: {field}: columns of different shapes: {shapes}") from None
    return made


def _plain(array: np.ndarray) -> np.ndarray:
    """Numbers as models have them: float32 for those with a point, int64 for whole ones of more than 8 bits."""
    if array.dtype.kind == "f" and array.dtype != np.float32:
        return array.astype(np.float32)
    return array.astype(np.int64) if array.dtype.kind in "iu" and array.dtype.itemsize > 1 else array
