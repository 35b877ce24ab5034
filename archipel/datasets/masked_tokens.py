"""Windows of text in which some tokens are hidden, for encoders that learn to tell them (Devlin et al. 2019)."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from archipel.datasets.dataset import INPUT, LABEL, Arrays, Dataset, Field
from archipel.datasets.readers.text import Unit
from archipel.datasets.text_splits import TextSplits, text_splits
from archipel.errors import DatasetError

TOKENS, MASK, TOKEN_TYPES = "tokens", "mask", "token_types"
IGNORED = -100
"""The label of a token that is not to be told; `losses.cross_entropy(ignore_index=-100)` leaves it out."""
_INT64 = np.dtype(np.int64)


class MaskedTokens:
    """The windows of a data set with hidden tokens, int64 `[length]` each: "tokens", "mask" (1 everywhere),
    "token_types" (0 everywhere), and "label", which is the token where one is hidden and -100 elsewhere.

    Of a window `share` of the tokens are chosen; 8 of 10 of these become `vocabulary`, a token of its own, one a random
    token, and one stays (appendix A.1). What is hidden follows from `seed` and the window's number, so it is the same
    in every epoch.

    Arguments:
        windows: a data set whose field "input" has tokens, such as one of `open_text`.
        vocabulary: tokens are below it, and it is the token that hides others; the network needs one more than that.
        share: of the tokens, above 0 and below 1.
        seed: determines what is hidden.

    Raises DatasetError for a data set without such a field, and for a share out of range.

    Example:
        data = MaskedTokens(open_text("shakespeare.txt", length=64), vocabulary=256)
    """

    def __init__(self, windows: Dataset, vocabulary: int, share: float = 0.15, seed: int = 0) -> None:
        field = windows.fields.get(INPUT)
        if field is None or field.dtype != _INT64 or len(field.shape) != 1 or not isinstance(field.shape[0], int):
            raise DatasetError(f"hidden tokens need a field 'input' of int64 [length]; the data have {windows.fields}")
        if not 0 < share < 1:
            raise DatasetError(f"share must be above 0 and below 1, is {share}")
        self._windows, self._vocabulary, self._share, self._seed = windows, vocabulary, share, seed
        self._length = field.shape[0]
        self.fields: Mapping[str, Field] = {
            name: Field(_INT64, field.shape) for name in (TOKENS, MASK, TOKEN_TYPES, LABEL)
        }

    def __len__(self) -> int:
        return len(self._windows)

    def take(self, rows: NDArray[np.intp]) -> Arrays:
        """The windows of these numbers. Raises DatasetError for a token that the vocabulary has not."""
        tokens = self._windows.take(rows)[INPUT]
        if tokens.size and (tokens.min() < 0 or tokens.max() >= self._vocabulary):
            raise DatasetError(f"tokens must be from 0 to {self._vocabulary - 1}, are up to {tokens.max()}")
        drawn = np.stack([self._draw(int(row)) for row in rows]) if len(rows) else np.empty((0, 3, self._length))
        chosen = drawn[:, 0] < self._share
        label = np.where(chosen, tokens, IGNORED)
        hidden = np.where(chosen & (drawn[:, 1] < 0.8), self._vocabulary, tokens)
        another = (drawn[:, 2] * self._vocabulary).astype(np.int64)
        hidden = np.where(chosen & (drawn[:, 1] >= 0.9), another, hidden)
        return {TOKENS: hidden, MASK: np.ones_like(hidden), TOKEN_TYPES: np.zeros_like(hidden), LABEL: label}

    def _draw(self, row: int) -> NDArray[np.float64]:
        return np.random.default_rng([self._seed, row]).random((3, self._length))


def masked_text_splits(
    path: str | os.PathLike[str], *, vocabulary: int = 256, share: float = 0.15, seed: int = 0, length: int = 128,
    unit: Unit = "bytes", alphabet: str | None = None, validation: float = 0.05, test: float = 0.05,
) -> TextSplits:  # fmt: skip
    """The three parts of `text_splits` with hidden tokens. Arguments and errors: those of it and of MaskedTokens.

    Example:
        splits = masked_text_splits("shakespeare.txt", length=64)
    """
    parts = text_splits(path, length=length, unit=unit, alphabet=alphabet, validation=validation, test=test)
    made = [
        MaskedTokens(part, vocabulary, share, seed + place)
        for place, part in enumerate((parts.train, parts.validation, parts.test))
    ]
    return TextSplits(made[0], made[1], made[2], parts.alphabet)
