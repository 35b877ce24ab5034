"""A text in three parts for language models: its beginning to train, its end to validate and to test."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from archipel.datasets.dataset import Dataset, Subset
from archipel.datasets.readers.text import Unit, open_text
from archipel.errors import DatasetError


@dataclass(frozen=True, eq=False)
class TextSplits:
    """Windows of a text, "input" and "label" int64 [length], in three parts without a common token.

    train       the first windows
    validation  those after them
    test        the last ones
    alphabet    the characters by number; empty where tokens are bytes

    Example:
        Path("play.txt").write_text("to be or not to be " * 100)
        splits = text_splits("play.txt", length=16)
        print(splits.train.take(np.array([0]))["input"].shape)  # (1, 16)
    """

    train: Dataset
    validation: Dataset
    test: Dataset
    alphabet: str


def text_splits(
    path: str | os.PathLike[str], *, length: int = 128, unit: Unit = "bytes", alphabet: str | None = None,
    validation: float = 0.05, test: float = 0.05,
) -> TextSplits:  # fmt: skip
    """The windows of `open_text`, which follow each other, in the text's order: training, validation, test.

    Arguments:
        path, length, unit, alphabet: as for `open_text`.
        validation: the share of the windows for validation.
        test: the share of the windows for the test.

    Raises DatasetError as `open_text`, and where a part would be empty.

    Example:
        splits = text_splits("shakespeare.txt", length=64)
    """
    windows = open_text(path, length=length, unit=unit, alphabet=alphabet)
    count = len(windows)
    held_out, last = round(count * validation), round(count * test)
    first = count - held_out - last
    # A label ends one token after its window, at the next one's beginning: a window between two parts is left out.
    if min(first, held_out, last) < 2:
        raise DatasetError(
            f"{os.fspath(path)}: {count} windows of {length} tokens are too few for shares of {validation:g} and "
            f"{test:g}; give a longer text or a smaller length"
        )
    ends = np.cumsum([first, held_out, last])
    parts = [Subset(windows, np.arange(start, end - 1)) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    return TextSplits(parts[0], parts[1], parts[2], windows.alphabet)
