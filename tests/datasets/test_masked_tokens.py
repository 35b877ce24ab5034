"""Hidden tokens: the shares of Devlin et al. 2019, the same in every epoch and in any batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from archipel.datasets import ArrayDataset, MaskedTokens, masked_text_splits, open_text
from archipel.errors import DatasetError


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_bytes(np.random.default_rng(0).integers(97, 123, 40_000).astype(np.uint8).tobytes())
    return tmp_path / "a.txt"


def test_what_is_hidden(text: Path) -> None:
    plain = open_text(text, length=50)
    data = MaskedTokens(plain, 256)
    rows = np.arange(len(data))
    batch, original = data.take(rows), plain.take(rows)["input"]
    chosen = batch["label"] != -100
    assert (batch["label"][chosen] == original[chosen]).all()
    assert (batch["tokens"][~chosen] == original[~chosen]).all()
    # 6,000 of 40,000 tokens; a standard deviation is 0.0018, and 0.005 of the shares among the chosen.
    assert chosen.mean() == pytest.approx(0.15, abs=0.007)
    hidden = batch["tokens"][chosen]
    assert (hidden == 256).mean() == pytest.approx(0.8, abs=0.02)
    assert (hidden == original[chosen]).mean() == pytest.approx(0.1, abs=0.02)
    assert batch["tokens"].max() == 256
    assert batch["mask"].all()
    assert not batch["token_types"].any()
    for name, values in data.take(rows[::-7]).items():
        np.testing.assert_array_equal(values, batch[name][::-7])
    assert (MaskedTokens(plain, 256, seed=1).take(rows)["label"] != batch["label"]).any()


def test_three_parts(text: Path) -> None:
    splits = masked_text_splits(text, length=50, validation=0.1, test=0.1)
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [638, 79, 79]
    assert {*splits.test.fields} == {"tokens", "mask", "token_types", "label"}


def test_wrong_data_are_refused(text: Path) -> None:
    with pytest.raises(DatasetError, match="share must be above 0 and below 1, is 1"):
        MaskedTokens(open_text(text), 256, share=1)
    with pytest.raises(DatasetError, match="need a field 'input' of int64"):
        MaskedTokens(ArrayDataset({"input": np.zeros((4, 3), np.float32)}), 256)
    with pytest.raises(DatasetError, match="tokens must be from 0 to 99, are up to 122"):
        MaskedTokens(open_text(text), 100).take(np.arange(3))
