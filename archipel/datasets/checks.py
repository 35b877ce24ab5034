"""Checks examples before a training has them: missing fields, NaN, infinity, labels out of range, unreadable rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from archipel.datasets.dataset import Arrays, Dataset, Field, Stream, Subset, locate
from archipel.datasets.left_out import NAMED, LeftOut, OnBad, check_on_bad
from archipel.datasets.opening import as_dataset
from archipel.datasets.order import count_of
from archipel.datasets.taking import pieces_of, rows_a_piece, take
from archipel.errors import DatasetError

_MOST_CLASSES = 2**31


def checked(
    data: object,
    *,
    need: Sequence[str] = (),
    classes: Mapping[str, int] | None = None,
    finite: bool = True,
    on_bad: OnBad = "error",
    once: bool = False,
) -> CheckedDataset | CheckedStream | SoundExamples:
    """The same examples, checked when they are read.

    Arguments:
        data: anything that `as_dataset` takes.
        need: fields that must be there.
        classes: how many classes the labels of a field have; fields with names of classes have as many as names.
        finite: refuse NaN and infinite numbers.
        on_bad: "skip" leaves out the examples that break a rule or cannot be read, and counts them (`left_out`). A
            data set is read once in full for that, so that its length is known; a stream leaves them out as it goes.
        once: with "skip", make a stream of a data set, too, which leaves them out as it goes: for what reads all once.

    Raises DatasetError, which names file and row, for a field that is missing at once, for examples when they are read.

    Example:
        data = checked("train.parquet", need=["input", "label"], classes={"label": 10}, on_bad="skip")
        print(data.left_out)
    """
    check_on_bad(on_bad)
    dataset = as_dataset(data)
    rules = _Rules.of(dataset, need, classes or {}, finite)
    if isinstance(dataset, Dataset):
        return SoundExamples(dataset, rules) if once and on_bad == "skip" else CheckedDataset(dataset, rules, on_bad)
    return CheckedStream(dataset, rules, on_bad)


def check_same_classes(files: Mapping[str, Dataset | Stream], names: Mapping[str, object]) -> None:
    """Labels must mean the same in all files: the numbers of texts and folders are by the names that a file has.

    Arguments:
        files: by the key of the setting that names each, such as "train".
        names: how errors call each file.

    Raises DatasetError that names key, file and field.
    """
    first = next(iter(files), "")
    for key, data in files.items():
        for field, own in data.fields.items():
            expected = files[first].fields.get(field, own)
            if own.classes != expected.classes:
                differs = sorted(set(own.classes) ^ set(expected.classes))[:3]
                raise DatasetError(
                    f"data.{key}: {names[key]}: field {field!r} has other classes than {names[first]} "
                    f"({', '.join(differs) or 'another order'}); name them in data.options, or give each file all of "
                    "them"
                )


def find_broken(
    data: Dataset | Stream,
    *,
    floats: Sequence[str] = (),
    classes: Mapping[str, int] | None = None,
    ignored: int | None = None,
    most: int = 4_000_000,
) -> tuple[str, str] | None:
    """The place and the fault of the first example that breaks a rule; None where none does.

    Arguments:
        data: read from its beginning.
        floats: fields whose numbers are finite.
        classes: how many classes the labels of a field have.
        ignored: a label that is no class, and right all the same.
        most: after about so many examples it gives up.

    Example:
        find_broken(data, floats=["input"])  # ("train.csv, line 18", "field 'input' is nan; correct it or ...")
    """  # fmt: skip
    rules, row = _Rules(classes or {}, [name for name in floats if data.fields[name].dtype.kind == "f"], ignored), 0
    for piece in pieces_of(data, rows_a_piece(data.fields)):
        wrong, reasons = rules.broken(piece)
        if wrong.any():
            place = int(np.argmax(wrong))
            return locate(data, row + place), reasons[place]
        row += count_of(piece)
        if row >= most:
            break
    return None


class _Rules:
    """What examples must keep to: `classes` by field, the fields `floats` finite, but for the label `ignored`."""

    def __init__(self, classes: Mapping[str, int], floats: Sequence[str], ignored: int | None = None) -> None:
        self.classes, self.floats, self.ignored = classes, floats, ignored

    @classmethod
    def of(cls, data: Dataset | Stream, need: Sequence[str], classes: Mapping[str, int], finite: bool) -> _Rules:
        """Those that `checked` is asked for. Raises DatasetError for fields that cannot have them."""
        has = ", ".join(data.fields)
        for name in [*need, *classes]:
            if name not in data.fields:
                raise DatasetError(
                    f"no field {name!r}; the data has {has}; name its columns so, or read it with fields="
                )
        counts = {name: len(field.classes) for name, field in data.fields.items() if field.classes}
        for name, count in classes.items():
            if data.fields[name].dtype.kind not in "iu" or not 0 < count < _MOST_CLASSES:
                raise DatasetError(f"{count} classes of field {name!r}, which is {data.fields[name]}; expected labels")
            counts[name] = count
        return cls(counts, [name for name, field in data.fields.items() if finite and field.dtype.kind == "f"])

    def broken(self, piece: Arrays) -> tuple[NDArray[np.bool_], dict[int, str]]:
        """Which examples break a rule, and what it is for each of them."""
        wrong = np.zeros(count_of(piece), bool)
        reasons: dict[int, str] = {}
        for name in self.floats:
            array = piece[name]
            # The sum of what is finite can be too large for its dtype, but seldom is.
            with np.errstate(over="ignore", invalid="ignore"):
                if np.isfinite(array.sum(dtype=array.dtype)):
                    continue
            good = np.isfinite(array).reshape(len(array), -1)
            for row in np.flatnonzero(~good.all(axis=1)):
                value = array[row].reshape(-1)[int(np.argmin(good[row]))]
                reasons.setdefault(int(row), f"field {name!r} is {value}; correct it or leave the example out")
                wrong[row] = True
        for name, count in self.classes.items():
            array = piece[name].reshape(len(piece[name]), -1)
            good = (array >= 0) & (array < count)
            if self.ignored is not None:
                good |= array == self.ignored
            for row in np.flatnonzero(~good.all(axis=1)):
                label = array[row][int(np.argmin(good[row]))]
                reasons.setdefault(
                    int(row), f"field {name!r} has label {label}, expected 0..{count - 1}; correct it or leave it out"
                )
                wrong[row] = True
        return wrong, reasons


class CheckedDataset:
    """A data set whose examples are checked when they are taken; `checked` makes one."""

    def __init__(self, dataset: Dataset, rules: _Rules, on_bad: Literal["error", "skip"]) -> None:
        self._rules, self.left_out = rules, LeftOut()
        self.dataset = dataset
        if on_bad == "skip":
            found = [rows for rows, _ in _sound_pieces(dataset, rules, self.left_out)]
            self.dataset = Subset(dataset, np.concatenate([np.empty(0, np.intp), *found]))
        self.fields: Mapping[str, Field] = dataset.fields
        # Shuffling keeps to blocks where the data set has some.
        self.blocks = getattr(self.dataset, "blocks", None)
        self.window = getattr(self.dataset, "window", 0)

    def __len__(self) -> int:
        return len(self.dataset)

    def take(self, rows: NDArray[np.intp]) -> Arrays:
        """The examples of these numbers. Raises DatasetError for the first that breaks a rule."""
        piece = take(self.dataset, rows)
        wrong, reasons = self._rules.broken(piece)
        if wrong.any():
            place = int(np.argmax(wrong))
            raise DatasetError(f"{self.locate(int(rows[place]))}: {reasons[place]}{_more(wrong)}")
        return piece

    def locate(self, row: int) -> str:
        """Where an example comes from."""
        return locate(self.dataset, row)


class SoundExamples:
    """The sound examples of a data set, as a stream; `checked` makes one. `left_out` counts in the last pass."""

    def __init__(self, dataset: Dataset, rules: _Rules) -> None:
        self.dataset, self._rules, self.left_out = dataset, rules, LeftOut()
        self.fields: Mapping[str, Field] = dataset.fields

    def read(self, start: int = 0) -> Iterator[Arrays]:
        """The examples from number `start` on; those that were left out do not count."""
        self.left_out = LeftOut()
        given = 0
        for rows, piece in _sound_pieces(self.dataset, self._rules, self.left_out):
            if given + len(rows) > start:
                yield {name: array[max(start - given, 0) :] for name, array in piece.items()}
            given += len(rows)


class CheckedStream:
    """A stream whose examples are checked as they come; `checked` makes one. `left_out` counts in the last pass."""

    def __init__(self, stream: Stream, rules: _Rules, on_bad: Literal["error", "skip"]) -> None:
        self.stream, self._rules, self._on_bad = stream, rules, on_bad
        self.fields: Mapping[str, Field] = stream.fields
        self.left_out = LeftOut()

    def read(self, start: int = 0) -> Iterator[Arrays]:
        """The examples from number `start` on; those that were left out do not count."""
        self.left_out = LeftOut()
        # What is left out before `start` is known only from reading it.
        row, given = (0, 0) if self._on_bad == "skip" else (start, start)
        for piece in self.stream.read(row):
            wrong, reasons = self._rules.broken(piece)
            for place in np.flatnonzero(wrong):
                text = f"{locate(self.stream, row + int(place))}: {reasons[int(place)]}"
                if self._on_bad == "error":
                    raise DatasetError(f"{text}{_more(wrong)}")
                self.left_out.add(text)
            row += count_of(piece)
            kept = {name: array[~wrong] for name, array in piece.items()} if wrong.any() else piece
            count = count_of(kept)
            if given + count > start:
                yield {name: array[max(start - given, 0) :] for name, array in kept.items()}
            given += count

    def locate(self, row: int) -> str:
        """Where an example comes from, if none before it was left out."""
        return locate(self.stream, row) if not self.left_out.count else f"example {row}"


def _sound_pieces(dataset: Dataset, rules: _Rules, left: LeftOut) -> Iterator[tuple[NDArray[np.intp], Arrays]]:
    """The numbers of the examples that can be read and break no rule, and the examples; the others go into `left`."""
    size = rows_a_piece(dataset.fields)
    for start in range(0, len(dataset), size):
        yield from _sound_among(dataset, np.arange(start, min(start + size, len(dataset))), rules, left)


def _sound_among(
    dataset: Dataset, rows: NDArray[np.intp], rules: _Rules, left: LeftOut
) -> Iterator[tuple[NDArray[np.intp], Arrays]]:
    try:
        piece = take(dataset, rows)
    except DatasetError as error:
        if len(rows) == 1:
            left.add(str(error))
            return
        # Halves, so that a bad example among many costs few readings.
        for part in np.array_split(rows, 2):
            yield from _sound_among(dataset, part, rules, left)
        return
    wrong, reasons = rules.broken(piece)
    for place in np.flatnonzero(wrong):
        where = locate(dataset, int(rows[place])) if len(left.first) < NAMED else ""
        left.add(f"{where}: {reasons[int(place)]}")
    if not wrong.all():
        yield rows[~wrong], {name: array[~wrong] for name, array in piece.items()} if wrong.any() else piece


def _more(wrong: NDArray[np.bool_]) -> str:
    count = int(wrong.sum()) - 1
    return f" (and {count} more of {len(wrong)})" if count else ""
