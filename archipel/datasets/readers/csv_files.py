"""CSV files: columns of numbers, alone or together as one array, and texts as classes. Damage is named by line."""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from archipel.datasets.dataset import INPUT, LABEL, ArrayDataset, Arrays, Field
from archipel.datasets.entry_names import LABELS
from archipel.datasets.left_out import NAMED, LeftOut, OnBad, check_on_bad
from archipel.datasets.order import count_of, join
from archipel.datasets.readers.arrow_columns import MAX_CLASSES
from archipel.datasets.readers.csv_cells import MISSING, Cells, ColumnFacts, CsvFile
from archipel.datasets.readers.extra import need
from archipel.errors import DatasetError

MAX_BYTES = 2 << 30

Columns = Mapping[str, str | Sequence[str]]


def open_csv(
    path: str | os.PathLike[str],
    *,
    fields: Columns | Literal["columns"] | None = None,
    classes: Mapping[str, Sequence[str]] | None = None,
    dtype: str = "float32",
    delimiter: str | None = None,
    names: Sequence[str] = (),
    skip: int = 0,
    missing_values: Sequence[str] = MISSING,
    missing: Literal["error", "nan"] = "error",
    on_bad: OnBad = "error",
    max_bytes: int = MAX_BYTES,
) -> CsvDataset:
    """The rows of a CSV file in memory. `CsvStream` takes the same arguments and reads a larger file in pieces.

    A column is one of numbers if more of its cells are numbers than texts. Whole numbers are int64, others `dtype`.
    A column of texts is a field of classes: their numbers, int64.

    Arguments:
        path: the file, in UTF-8; `.gz` is unpacked.
        fields: for each field a column, or a list of columns of numbers that become one array `[columns]` of `dtype`.
            By default "label" is the column of that name (or y, labels, target; else the last one), and "input" all
            others together. "columns" makes each column a field.
        classes: the texts of the labels 0, 1, ... of a column; by default all of them, sorted. Give them where several
            files must agree.
        dtype: the dtype of numbers that are not whole.
        delimiter: between cells; by default a comma, a tab in `.tsv`.
        names: the names of the columns, where the file has no head.
        skip: how many lines to leave out before the head.
        missing_values: which cells have no value.
        missing: "nan" reads numbers that are missing as NaN, and missing texts as a class "(missing)".
        on_bad: "skip" leaves out rows that are damaged or have no value, and counts them (`left_out`).
        max_bytes: the limit for the arrays.

    Raises DatasetError, which names file, line and column, for damaged rows, cells that are no numbers, missing values,
    missing columns and unknown classes; MissingExtraError without pyarrow.

    Example:
        data = open_csv("adult.csv", fields={"input": ["age", "hours"], "label": "income"}, on_bad="skip")
        print(data.left_out, data.fields["label"].classes)
    """
    stream = CsvStream(
        path, fields=fields, classes=classes, dtype=dtype, delimiter=delimiter, names=names, skip=skip,
        missing_values=missing_values, missing=missing, on_bad=on_bad,
    )  # fmt: skip
    pieces, size = [], 0
    for piece in stream.read():
        pieces.append(piece)
        size += sum(array.nbytes for array in piece.values())
        if size > max_bytes:
            raise DatasetError(
                f"{path}: more than {max_bytes} bytes of arrays; convert it first: archipel data convert {path} "
                f"{Path(path).stem}.parquet"
            )
    if not pieces:
        raise DatasetError(f"{path}: no rows; {stream.left_out}" if stream.left_out.count else f"{path}: no rows")
    return CsvDataset(join(pieces), stream)


class CsvDataset(ArrayDataset):
    """The rows of a CSV file in memory; `left_out` says what is not among them."""

    def __init__(self, arrays: Arrays, stream: CsvStream) -> None:
        known = {name: field.classes for name, field in stream.fields.items()}
        super().__init__(arrays, classes=known, name=str(stream.file.path))
        self.left_out = stream.left_out
        self._stream = stream

    def locate(self, row: int) -> str:
        """The file and the line in it, from 1."""
        return self._stream.locate(row)


class CsvStream:
    r"""The rows of a CSV file in pieces; arguments and errors are those of `open_csv`.

    It goes through the file once when it is made, to see what the columns are. `left_out` says what it did not give
    in the last pass.

    Example:
        Path("ages.csv").write_text("age,income\n31,high\n57,low\n")
        stream = CsvStream("ages.csv", fields={"input": ["age"], "label": "income"})
        for piece in stream.read():
            print(piece["input"].shape)  # (2, 1)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        fields: Columns | Literal["columns"] | None = None,
        classes: Mapping[str, Sequence[str]] | None = None,
        dtype: str = "float32",
        delimiter: str | None = None,
        names: Sequence[str] = (),
        skip: int = 0,
        missing_values: Sequence[str] = MISSING,
        missing: Literal["error", "nan"] = "error",
        on_bad: OnBad = "error",
    ) -> None:
        check_on_bad(on_bad)
        if missing not in ("error", "nan") or np.dtype(dtype).kind != "f" or skip < 0:
            raise DatasetError(
                f"missing is 'error' or 'nan', dtype a float, skip from 0; got {missing}, {dtype}, {skip}"
            )
        where = Path(path)
        tab = where.name.removesuffix(".gz").endswith(".tsv")
        self.file = CsvFile(where, delimiter or ("\t" if tab else ","), tuple(names), skip, tuple(missing_values))
        self._on_bad, self._missing, self._dtype = on_bad, missing, np.dtype(dtype)
        there = self.file.read_names()
        other = next((each for each in ";\t|" if len(there) == 1 and each in there[0]), None)
        if other is not None and delimiter is None:
            raise DatasetError(
                f"{where}: has one column, {there[0][:40]!r}; give the delimiter: delimiter={other!r}, or ','"
            )
        self.columns = _assign(where, there, fields)
        for name in classes or {}:
            if name not in self._used():
                raise DatasetError(f"{where}: classes for column {name!r}, which no field reads")
        self._facts = {name: ColumnFacts() for name in self._used()}
        for block in self.file.read(self._used(), []):
            for name, facts in self._facts.items():
                facts.add(block.column(name), self.file.missing)
        self._find_all_names()
        given = {name: tuple(known) for name, known in (classes or {}).items()}
        self._classes = {name: given[name] if name in given else self._find_classes(name) for name in self._used()}
        self.fields: Mapping[str, Field] = {name: self._field(name, columns) for name, columns in self.columns.items()}
        self.left_out = LeftOut()
        self._gaps: NDArray[np.int64] = np.empty(0, np.int64)

    def read(self, start: int = 0) -> Iterator[Arrays]:
        """The rows from number `start` on; rows that were left out do not count."""
        self.left_out = LeftOut()
        damaged: list[int] = []
        gone: list[int] = []
        uneven = f"expected {len(self.file.read_names())} cells, one for each column"
        # Records are counted from 1, and the head is one of them.
        number, counted, row = 1 + (not self.file.names), 0, 0
        for block in self.file.read(self._used(), damaged):
            bad = _Damage()
            bad.add(damaged[counted:], [uneven])
            gone.extend(damaged[counted:])
            counted = len(damaged)
            numbers = _without(number, len(block), damaged)
            number = int(numbers[-1]) + 1 if len(numbers) else number
            piece, fine = self._decode(block, numbers, bad)
            self._note(bad)
            gone.extend(numbers[~fine].tolist())
            if len(gone) > len(self._gaps):
                self._gaps = np.sort(np.array(gone, np.int64))
            kept = {name: array[fine] for name, array in piece.items()} if not fine.all() else piece
            count = count_of(kept)
            if row + count > start:
                yield {name: array[max(start - row, 0) :] for name, array in kept.items()}
            row += count
        bad = _Damage()
        bad.add(damaged[counted:], [uneven])
        self._note(bad)

    def locate(self, row: int) -> str:
        """The file and the line in it, from 1, of a row that was read."""
        number = int(_without(1 + (not self.file.names), row + 1, self._gaps.tolist())[-1])
        return f"{self.file.path}, line {self.file.lines([number]).get(number, number)}"

    def _decode(self, block: Any, numbers: NDArray[np.int64], bad: _Damage) -> tuple[Arrays, NDArray[np.bool_]]:
        """The fields of a piece, and which of its rows are sound; the others go into `bad`."""
        fine = np.ones(len(block), bool)
        columns: dict[str, NDArray[Any]] = {}
        for name in self._used():
            column, cells = block.column(name), Cells(block.column(name), self.file.missing)
            if self._missing == "error":
                bad.add(numbers[cells.missing & fine].tolist(), [f"no value in column {name!r}"])
                fine &= ~cells.missing
            known = self._classes[name]
            if known:
                columns[name], wrong = _numbers_of(column, known, cells.missing)
                what = "none of the classes " + ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
            else:
                columns[name], wrong = cells.values, ~cells.numeric & ~cells.missing
                what = "no number"
            if (wrong & fine).any():
                rows = np.flatnonzero(wrong & fine)
                texts = [column[int(row)].as_py()[:40] for row in rows[:NAMED]]
                reasons = [f"{text!r} in column {name!r} is {what}" for text in texts]
                bad.add(numbers[rows].tolist(), reasons)
            fine &= ~wrong
        made: Arrays = {}
        for name, sources in self.columns.items():
            dtype = self.fields[name].dtype
            with np.errstate(invalid="ignore", over="ignore"):
                if isinstance(sources, str):
                    made[name] = columns[sources].astype(dtype)
                else:
                    made[name] = np.stack([columns[source] for source in sources], axis=1).astype(dtype)
        return made, fine

    def _note(self, bad: _Damage) -> None:
        """Raise for damaged records, or count them."""
        if not bad.count:
            return
        first = sorted(bad.first)[: NAMED - len(self.left_out.first)]
        lines = self.file.lines([number for number, _ in first])
        named = [f"{self.file.path}, line {lines.get(number, number)}: {what}" for number, what in first]
        if self._on_bad == "error":
            more = f" (and {bad.count - 1} more near it)" if bad.count > 1 else ""
            raise DatasetError(f"{named[0]}{more}; correct the file, or leave such rows out with on_bad='skip'")
        self.left_out.count += bad.count
        self.left_out.first += named

    def _used(self) -> list[str]:
        names: dict[str, None] = {}
        for columns in self.columns.values():
            names.update(dict.fromkeys([columns] if isinstance(columns, str) else columns))
        return list(names)

    def _find_all_names(self) -> None:
        pa, pc = need("pyarrow"), need("pyarrow.compute")
        late = [name for name, facts in self._facts.items() if facts.some_names and not facts.is_numeric]
        missing = pa.array(self.file.missing, pa.string())
        for block in self.file.read(late, []) if late else ():
            for name in late:
                column = block.column(name)
                self._facts[name].add_names(column.filter(pc.invert(pc.is_in(column, missing))))

    def _find_classes(self, name: str) -> tuple[str, ...]:
        facts = self._facts[name]
        if facts.is_numeric or not facts.texts:
            return ()
        if len(facts.names) > MAX_CLASSES:
            raise DatasetError(
                f"{self.file.path}: column {name!r} has more than {MAX_CLASSES} different texts, which are no classes; "
                "leave it out with fields={...}"
            )
        missing = ["(missing)"] if facts.missing and self._missing == "nan" else []
        return (*sorted(facts.names), *missing)

    def _field(self, name: str, columns: str | Sequence[str]) -> Field:
        if isinstance(columns, str):
            facts, known = self._facts[columns], self._classes[columns]
            whole = facts.is_whole and not (facts.missing and self._missing == "nan") and facts.numbers
            return Field(np.dtype(np.int64) if known or whole else self._dtype, (), known)
        for column in columns:
            if known := self._classes[column]:
                raise DatasetError(
                    f"{self.file.path}: column {column!r} has texts ({known[0]!r}), which can be no numbers of field "
                    f"{name!r}; name the columns of each field: fields={{{name!r}: [...], {column!r}: {column!r}}}"
                )
        return Field(self._dtype, (len(columns),))


class _Damage:
    """The damaged records of a piece: how many, and the first ones of each kind with the reason."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[tuple[int, str]] = []

    def add(self, numbers: list[int], reasons: list[str]) -> None:
        """Count these records. `reasons` says what is wrong with each of the first ones, or with all."""
        self.count += len(numbers)
        reasons = reasons if len(reasons) > 1 else reasons * NAMED
        self.first += list(zip(numbers[:NAMED], reasons))


def _assign(
    path: Path, there: list[str], fields: Columns | Literal["columns"] | None
) -> dict[str, str | tuple[str, ...]]:
    if len(set(there)) != len(there):
        twice = next(name for name in there if there.count(name) > 1)
        raise DatasetError(f"{path}: two columns are called {twice!r}; give each a name: names=[...], skip=1")
    if fields == "columns":
        return {name: name for name in there}
    if fields is None:
        lower = {name.lower(): name for name in reversed(there)}
        label = next((lower[name] for name in LABELS if name in lower), there[-1])
        others = tuple(name for name in there if name != label)
        return {INPUT: others, LABEL: label} if others else {label: label}
    assigned = {name: columns if isinstance(columns, str) else tuple(columns) for name, columns in fields.items()}
    for name, columns in assigned.items():
        if not columns:
            raise DatasetError(f"{path}: field {name!r} has no columns; name one")
        for column in [columns] if isinstance(columns, str) else columns:
            if column not in there:
                known = ", ".join(map(repr, there[:12])) + (", ..." if len(there) > 12 else "")
                raise DatasetError(f"{path}: no column {column!r}; it has {known}")
    if not assigned:
        raise DatasetError(f"{path}: no fields; name columns, such as fields={{'input': ['a', 'b'], 'label': 'c'}}")
    return assigned


def _numbers_of(
    column: Any, known: tuple[str, ...], missing: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    pa, pc = need("pyarrow"), need("pyarrow.compute")
    found = pc.fill_null(pc.index_in(column, pa.array(known, pa.string())), -1)
    numbers = np.asarray(found).astype(np.int64)
    if known[-1] == "(missing)":
        numbers[missing] = len(known) - 1
    return numbers, (numbers < 0) & ~missing


def _without(first: int, count: int, gone: list[int]) -> NDArray[np.int64]:
    """The first `count` numbers from `first` on that are not among the ascending `gone`."""
    gone = gone[bisect.bisect_left(gone, first) :]
    numbers = np.arange(first, first + count + len(gone), dtype=np.int64)
    return numbers[~np.isin(numbers, gone)][:count]
