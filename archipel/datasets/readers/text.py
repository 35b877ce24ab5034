"""Text files as token numbers: windows for language models, and lines."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from archipel.datasets.dataset import INPUT, LABEL, Arrays, Field
from archipel.datasets.ragged import LENGTH, stack
from archipel.errors import DatasetError
from archipel.library_errors import one_line

MAX_BYTES = 4 << 30
_INT64 = np.dtype(np.int64)

Unit = Literal["bytes", "characters"]


def open_text(
    path: str | os.PathLike[str],
    *,
    length: int = 128,
    stride: int | None = None,
    unit: Unit = "bytes",
    alphabet: str | None = None,
) -> TextWindows:
    """Windows of text for a language model: "input" int64 `[length]`, and "label" the same one token later.

    Arguments:
        path: a file in UTF-8, or a folder of `*.txt`, whose files follow each other in the order of their names; no
            window has parts of two. `.gz` is unpacked in memory.
        length: tokens in a window.
        stride: tokens from the start of one window to that of the next; `length` by default, so that each token is
            predicted once. With 1 every place is the start of a window.
        unit: "bytes" are tokens 0 ... 255, read from the mapped file; "characters" are numbered by `alphabet`, in
            memory.
        alphabet: the characters 0, 1, ...; by default all of the text, sorted. The field's classes are its characters.

    Raises DatasetError for a file that is missing, too short or no UTF-8, and for a character that is not in the
    alphabet: it names file and line.

    Example:
        data = open_text("shakespeare.txt", length=64, unit="characters")
        "".join(data.alphabet[token] for token in data.take(np.array([0]))["input"][0])
    """
    if length < 1 or (stride is not None and stride < 1):
        raise DatasetError(f"length and stride must be at least 1, got {length} and {stride}")
    return TextWindows(_Tokens(Path(path), unit, alphabet), length, stride or length)


def open_lines(path: str | os.PathLike[str], *, unit: Unit = "bytes", alphabet: str | None = None) -> TextLines:
    """The lines of a text as token numbers: "input" int64 `[n]`, as long as the longest of a batch, the others end with
    zeros; "input_length" has the lengths. Lines have no end of line, and empty ones do not count.

    Arguments and errors are those of `open_text`.

    Example:
        data = open_lines("names.txt", unit="characters")
    """
    return TextLines(_Tokens(Path(path), unit, alphabet))


class _Tokens:
    """The tokens of each file, and what numbers mean."""

    def __init__(self, path: Path, unit: str, alphabet: str | None) -> None:
        if unit not in ("bytes", "characters") or (alphabet is not None and unit == "bytes"):
            raise DatasetError(f"unit is 'bytes', or 'characters' with or without an alphabet, got {unit!r}")
        self.paths = sorted([*path.glob("*.txt"), *path.glob("*.txt.gz")]) if path.is_dir() else [path]
        if not self.paths:
            raise DatasetError(f"{path}: no *.txt in this folder; give a text file")
        self.files = [_read_bytes(file) for file in self.paths]
        self.alphabet = ""
        if unit == "characters":
            texts = [_characters(file, data) for file, data in zip(self.paths, self.files)]
            known = np.unique(np.concatenate(texts)) if alphabet is None else _codes(alphabet)
            if len(np.unique(known)) != len(known):
                raise DatasetError("the alphabet has a character twice; name each once")
            self.alphabet = known.astype("<u4").tobytes().decode("utf-32-le")
            self.files = [_number(file, text, known) for file, text in zip(self.paths, texts)]
        self.field = Field(_INT64, (), tuple(self.alphabet))
        # The numbers of the two characters that end lines; -1 where the text has none.
        self.newline = 10 if unit == "bytes" else self.alphabet.find("\n")
        self.carriage_return = 13 if unit == "bytes" else self.alphabet.find("\r")

    def line(self, file: int, place: int) -> str:
        """The file and the line, from 1, of a token."""
        return f"{self.paths[file]}, line {1 + int((self.files[file][:place] == self.newline).sum())}"


class TextWindows:
    """Windows of text; `open_text` makes them. `alphabet` has the characters by number."""

    def __init__(self, tokens: _Tokens, length: int, stride: int) -> None:
        self._tokens, self._length, self._stride = tokens, length, stride
        self.alphabet = tokens.alphabet
        counts = [max((len(file) - length - 1) // stride + 1, 0) for file in tokens.files]
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        if not self._starts[-1]:
            longest = max(len(file) for file in tokens.files)
            raise DatasetError(
                f"{tokens.paths[0]}: {longest} tokens are fewer than a window of {length} and the next; give a longer "
                "text or a smaller length"
            )
        field = Field(_INT64, (length,), tokens.field.classes)
        self.fields: Mapping[str, Field] = {INPUT: field, LABEL: field}

    def __len__(self) -> int:
        return int(self._starts[-1])

    def take(self, rows: NDArray[np.intp]) -> Arrays:
        """The windows of these numbers."""
        made = np.empty((len(rows), self._length + 1), np.int64)
        for place, row in enumerate(rows):
            file, start = self._place(int(row))
            made[place] = self._tokens.files[file][start : start + self._length + 1]
        return {INPUT: made[:, :-1].copy(), LABEL: made[:, 1:].copy()}

    def locate(self, row: int) -> str:
        """The file and the line that a window starts in."""
        return self._tokens.line(*self._place(row))

    def _place(self, row: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._starts, row, side="right")) - 1
        return file, (row - int(self._starts[file])) * self._stride


class TextLines:
    """The lines of texts; `open_lines` makes them. `alphabet` has the characters by number."""

    def __init__(self, tokens: _Tokens) -> None:
        self._tokens, self.alphabet = tokens, tokens.alphabet
        places = [_lines(file, tokens.newline, tokens.carriage_return) for file in tokens.files]
        self._lines = np.concatenate(
            [np.column_stack([np.full(len(lines), file), lines]) for file, lines in enumerate(places)]
        )
        if not len(self._lines):
            raise DatasetError(f"{tokens.paths[0]}: no lines; give another text")
        self.fields: Mapping[str, Field] = {
            INPUT: Field(_INT64, (None,), tokens.field.classes), INPUT + LENGTH: Field(_INT64)
        }  # fmt: skip

    def __len__(self) -> int:
        return len(self._lines)

    def take(self, rows: NDArray[np.intp]) -> Arrays:
        """The lines of these numbers."""
        lines = [self._tokens.files[file][start:stop] for file, start, stop in self._lines[rows]]
        return {INPUT: stack(lines, 1, _INT64), INPUT + LENGTH: np.array([len(line) for line in lines], np.int64)}

    def locate(self, row: int) -> str:
        """The file and the line in it, from 1."""
        file, start, _ = self._lines[row]
        return self._tokens.line(int(file), int(start))


def _read_bytes(path: Path) -> NDArray[Any]:
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as file:
                data = file.read(MAX_BYTES + 1)
            if len(data) > MAX_BYTES:
                raise DatasetError(f"{path}: it unpacks to more than {MAX_BYTES} bytes; unpack it, and use bytes")
            return np.frombuffer(data, np.uint8)
        if not path.stat().st_size:  # an empty file cannot be mapped
            return np.empty(0, np.uint8)
        return np.memmap(path, np.uint8, "r")
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise DatasetError(f"{path}: {reason}; give a text file") from None


def _characters(path: Path, data: NDArray[Any]) -> NDArray[np.uint32]:
    if len(data) > MAX_BYTES:
        raise DatasetError(f"{path}: more than {MAX_BYTES} bytes; use unit='bytes', which stay on the disk")
    try:
        return _codes(bytes(data).decode("utf-8"))
    except UnicodeDecodeError as error:
        line = 1 + int((data[: error.start] == 10).sum())
        raise DatasetError(f"{path}, line {line}: no UTF-8 ({error.reason}); convert it, or use unit='bytes'") from None


def _codes(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def _number(path: Path, text: NDArray[np.uint32], known: NDArray[np.uint32]) -> NDArray[Any]:
    order = np.argsort(known)
    places = np.searchsorted(known, text, sorter=order)
    numbers = order[np.minimum(places, len(known) - 1)] if len(known) else np.zeros(len(text), np.intp)
    wrong = np.flatnonzero(known[numbers] != text) if len(known) else np.arange(len(text))
    if len(wrong):
        line = 1 + int((text[: wrong[0]] == 10).sum())
        raise DatasetError(
            f"{path}, line {line}: the character {chr(text[wrong[0]])!r} is not in the alphabet; "
            "add it, or clean the text"
        )
    return numbers.astype(np.uint8 if len(known) <= 256 else np.int32)


def _lines(tokens: NDArray[Any], newline: int, carriage_return: int) -> NDArray[np.intp]:
    """From and to of each line that is not empty: `[lines, 2]`."""
    ends = np.append(np.flatnonzero(tokens == newline), len(tokens))
    starts = np.append(0, ends[:-1] + 1)
    if len(tokens):
        ends = ends - ((ends > starts) & (tokens[ends - 1] == carriage_return))
    return np.column_stack([starts, ends])[ends > starts]
