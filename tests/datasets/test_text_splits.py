"""A text in three parts: each token is in one of them, in the text's order."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from archipel.datasets import text_splits
from archipel.errors import DatasetError


def test_parts_have_no_token_in_common(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).permutation(np.arange(0x100, 0x100 + 1000))  # a thousand different characters
    (tmp_path / "a.txt").write_text("".join(map(chr, numbers)), encoding="utf-8")
    splits = text_splits(tmp_path / "a.txt", length=10, unit="characters", validation=0.1, test=0.2)
    seen: list[set[str]] = []
    for part, count in ((splits.train, 68), (splits.validation, 9), (splits.test, 19)):
        assert len(part) == count
        rows = part.take(np.arange(count))
        text = [[splits.alphabet[token] for token in row] for row in rows["input"]]
        assert [row[1:] for row in rows["input"].tolist()] == [row[:-1] for row in rows["label"].tolist()]
        seen.append({c for row in text for c in row} | {splits.alphabet[row[-1]] for row in rows["label"]})
        assert len(seen[-1]) == 10 * count + 1
    assert not seen[0] & seen[1]
    assert not seen[1] & seen[2]
    assert chr(numbers[0]) in seen[0]


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 100)
    with pytest.raises(DatasetError, match=re.escape("9 windows of 10 tokens are too few for shares of 0.05 and 0.05")):
        text_splits(tmp_path / "a.txt", length=10)
