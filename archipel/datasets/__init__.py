"""Real data as NumPy arrays. Needs numpy only."""

from __future__ import annotations

from archipel.datasets.digits import DigitsByWriter
from archipel.datasets.digits_file import digits_by_writer
from archipel.datasets.splits import WriterSplit, split_own_digits, split_writers

__all__ = ["DigitsByWriter", "WriterSplit", "digits_by_writer", "split_own_digits", "split_writers"]
