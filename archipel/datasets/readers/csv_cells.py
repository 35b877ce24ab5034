"""The cells of CSV files: which are numbers, which have no value, and in which line of the file they are."""

from __future__ import annotations

import csv
import gzip
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from archipel.datasets.readers.arrow_columns import MAX_CLASSES
from archipel.datasets.readers.extra import arrow_errors, need
from archipel.errors import DatasetError
from archipel.library_errors import one_line

if TYPE_CHECKING:
    import pyarrow as pa

MISSING = ("", "?", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "NULL", "null", "None")
MAX_COLUMNS = 10_000
# No line is longer than a block.
_BLOCK_BYTES = 4 << 20
_FEW = 1000
_LET_GO_SECONDS = 5.0
_NUMBER = r"^[+-]?((\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?|[iI][nN][fF])$"


@dataclass(frozen=True)
class CsvFile:
    """A CSV file and how to read it.

    path       the file; `.gz` is unpacked
    delimiter  between the cells of a line
    names      the names of the columns, where the file has no head
    skip       how many lines come before the head or the first row
    missing    which cells have no value, without the spaces around them
    """

    path: Path
    delimiter: str = ","
    names: tuple[str, ...] = ()
    skip: int = 0
    missing: tuple[str, ...] = MISSING

    def read_names(self) -> list[str]:
        """The names of the columns. Raises DatasetError for a file without a head."""
        names = list(self.names)
        if not names:
            for _, names in self._records():  # noqa: B007  (the first is the head)
                break
            if names and all(re.match(_NUMBER, name.strip()) for name in names):
                raise DatasetError(f"{self.path}: line {self.skip + 1} has numbers; write a head with names of columns "
                                   "above it, or give them: names=[...]")  # fmt: skip
            if any("\ufffd" in name for name in names):
                raise DatasetError(f"{self.path}: no text in UTF-8; save it as that")
        names = [name.strip() for name in names]
        if not names:
            raise DatasetError(f"{self.path}: is empty; give a file with a head and rows")
        if len(names) > MAX_COLUMNS:
            raise DatasetError(f"{self.path}: {len(names)} columns, expected 1..{MAX_COLUMNS}; look at the delimiter")
        return names

    def read(self, columns: list[str], damaged: list[int]) -> Iterator[pa.RecordBatch]:
        """These columns of all rows that have a cell for each column, in pieces of texts without spaces around them.

        Adds to `damaged` the numbers (`lines`) of the other rows. Raises DatasetError for a file that is no CSV.
        """
        pa, pc, pacsv = need("pyarrow"), need("pyarrow.compute"), need("pyarrow.csv")

        def note(row: object) -> str:
            damaged.append(row.number)  # type: ignore[attr-defined]
            return "skip"

        names = self.read_names()
        # By number: a head may have spaces around its names, and pyarrow takes them as they are.
        numbered = [str(number) for number in range(len(names))]
        wanted = [str(names.index(column)) for column in columns]
        reader, mine = None, sys.getrefcount(note)
        try:
            reader = pacsv.open_csv(
                pa.input_stream(str(self.path), compression="gzip" if self.path.suffix == ".gz" else None),
                read_options=pacsv.ReadOptions(
                    use_threads=False, block_size=_BLOCK_BYTES, skip_rows=self.skip, column_names=numbered
                ),
                parse_options=pacsv.ParseOptions(delimiter=self.delimiter, invalid_row_handler=note),
                convert_options=pacsv.ConvertOptions(
                    column_types={name: pa.string() for name in wanted},
                    include_columns=wanted,
                    strings_can_be_null=False,
                ),
            )
            head = not self.names
            for block in reader:
                trimmed = [pc.utf8_trim_whitespace(column) for column in block.columns]
                yield pa.RecordBatch.from_arrays([column[int(head) :] for column in trimmed], names=columns)
                head = False
        except arrow_errors() as error:
            raise DatasetError(f"{self.path}: {one_line(error)}; correct the file") from None
        finally:
            del reader
            # A thread of pyarrow lets go of `note` a little later, for which it takes Python's lock: where Python has
            # ended meanwhile, that aborts the process.
            latest = time.monotonic() + _LET_GO_SECONDS
            while sys.getrefcount(note) > mine and time.monotonic() < latest:
                time.sleep(0.0005)

    def lines(self, numbers: list[int]) -> dict[int, int]:
        """The lines, from 1, of these records, which are counted from 1 with the head and without empty lines."""
        wanted, found = set(numbers), dict[int, int]()
        if not wanted:
            return found
        for number, (line, _) in enumerate(self._records(), 1):
            if number in wanted:
                found[number] = line
                if len(found) == len(wanted):
                    break
        return found

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        opener = gzip.open if self.path.suffix == ".gz" else open
        try:
            with opener(self.path, "rt", encoding="utf-8-sig", errors="replace", newline="") as file:
                for _ in range(self.skip):
                    file.readline(_BLOCK_BYTES)
                reader = csv.reader(file, delimiter=self.delimiter)
                for record in reader:
                    if record:
                        yield reader.line_num + self.skip, record
        except OSError as error:
            raise DatasetError(f"{self.path}: {error.strerror or one_line(error)}; give a CSV file") from None
        except (csv.Error, EOFError, ValueError) as error:
            raise DatasetError(f"{self.path}: {one_line(error)}; correct the file") from None


@dataclass
class ColumnFacts:
    """What a column has.

    numbers, whole  how many cells are numbers, and whole numbers
    missing, texts  how many have no value, and how many are something else
    names           the different texts, as many as can be classes
    some_names      whether `names` has some of them only, since the column began with numbers
    """

    numbers: int = 0
    whole: int = 0
    missing: int = 0
    texts: int = 0
    names: set[str] = field(default_factory=set)
    some_names: bool = False

    @property
    def is_numeric(self) -> bool:
        """Whether it is a column of numbers: texts among more numbers are damage."""
        return self.numbers > 0 and self.numbers >= self.texts

    @property
    def is_whole(self) -> bool:
        """Whether all its numbers are whole."""
        return self.whole == self.numbers

    def add(self, column: pa.Array, missing: tuple[str, ...]) -> None:
        """Count the cells of a piece."""
        cells = Cells(column, missing)
        self.missing += int(cells.missing.sum())
        self.numbers += int(cells.numeric.sum())
        self.whole += int((cells.numeric & np.isfinite(cells.values) & (cells.values == np.floor(cells.values))
                           & (np.abs(cells.values) < 2**53)).sum())  # fmt: skip
        odd = ~cells.missing & ~cells.numeric
        self.texts += int(odd.sum())
        # Where all so far are numbers, a few: they are names of classes if the rest turns out to be texts.
        if self.texts or len(self.names) <= _FEW:
            self.add_names(column.filter(need("pyarrow").array(~cells.missing)))
        else:
            self.some_names = True

    def add_names(self, column: pa.Array) -> None:
        """Take in the different texts of a piece, until there are more than can be classes."""
        if len(self.names) <= MAX_CLASSES:
            self.names.update(need("pyarrow.compute").unique(column).to_pylist())


class Cells:
    """A piece of a column, read as numbers.

    missing  bool [rows]: cells without a value
    numeric  bool [rows]: cells that are numbers
    values   float64 [rows]: the numbers, NaN elsewhere
    """

    def __init__(self, column: pa.Array, missing: tuple[str, ...]) -> None:
        pa, pc = need("pyarrow"), need("pyarrow.compute")
        self.missing: NDArray[np.bool_] = np.asarray(pc.is_in(column, pa.array(missing, pa.string())))
        self.numeric: NDArray[np.bool_] = ~self.missing
        self.values: NDArray[np.float64] = np.full(len(column), np.nan)
        given = column if not self.missing.any() else column.filter(pa.array(self.numeric))
        try:
            self.values[self.numeric] = pc.cast(given, pa.float64())
        except arrow_errors():
            # Some cell is no number: find out which.
            numeric = np.asarray(pc.match_substring_regex(given, _NUMBER))
            self.numeric[self.numeric] = numeric
            self.values[self.numeric] = pc.cast(given.filter(pa.array(numeric)), pa.float64())
