"""Text as tokens, against Python's own strings."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipel.datasets import as_dataset, open_lines, open_text
from archipel.errors import DatasetError
from tests.datasets.test_published import folder

TEXT = st.text(st.characters(codec="utf-8"), min_size=3, max_size=60)


@pytest.mark.sampled(every=3)
@settings(max_examples=60)
@given(texts=st.lists(TEXT, min_size=1, max_size=3), length=st.integers(1, 6), stride=st.integers(1, 7))
def test_windows_are_the_texts(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], length: int, stride: int
) -> None:
    place = tmp_path_factory.mktemp("texts")
    for number, text in enumerate(texts):
        (place / f"{number}.txt").write_bytes(text.encode())
    for unit, sources in (("characters", texts), ("bytes", [text.encode() for text in texts])):
        expected = [
            source[start : start + length + 1] for source in sources for start in range(0, len(source) - length, stride)
        ]
        if not expected:
            with pytest.raises(DatasetError, match="tokens are fewer than a window"):
                open_text(place, length=length, stride=stride, unit=unit)
            continue
        data = open_text(place, length=length, stride=stride, unit=unit)
        taken = data.take(np.arange(len(data)))
        joined = np.concatenate([taken["input"], taken["label"][:, -1:]], axis=1)
        assert np.array_equal(taken["input"][:, 1:], taken["label"][:, :-1])
        if unit == "bytes":
            assert [bytes(row) for row in joined.astype(np.uint8)] == expected
        else:
            assert ["".join(data.alphabet[token] for token in row) for row in joined] == expected
            assert list(data.alphabet) == sorted(set("".join(texts)))


def test_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("eins\r\n\nzwölf\n".encode())
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"last"))
    data = open_lines(tmp_path, unit="characters")
    taken = data.take(np.array([2, 0, 1]))
    assert taken["input_length"].tolist() == [4, 4, 5]
    lines = [
        "".join(data.alphabet[token] for token in row[:n]) for row, n in zip(taken["input"], taken["input_length"])
    ]
    assert lines == ["last", "eins", "zwölf"]
    assert [data.locate(row) for row in (1, 2)] == [f"{tmp_path / 'a.txt'}, line 3", f"{tmp_path / 'b.txt.gz'}, line 1"]
    raw = open_lines(tmp_path).take(np.array([1]))
    assert bytes(raw["input"][0].astype(np.uint8)).decode() == "zwölf"


def test_an_alphabet_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abba\ncab\n")
    data = open_text(tmp_path / "a.txt", length=4, unit="characters", alphabet="\ncba")
    assert data.take(np.array([0]))["input"].tolist() == [[3, 2, 2, 3]]
    assert data.fields["input"].classes == ("\n", "c", "b", "a")
    for options, message in (
        ({"alphabet": "ab\n"}, "a.txt, line 2: the character 'c' is not in the alphabet"),
        ({"alphabet": "aab"}, "a character twice"),
        ({"alphabet": ""}, "line 1: the character 'a' is not in the alphabet"),
        ({"unit": "bytes", "alphabet": "ab"}, "unit is 'bytes'"),
        ({"length": 0}, "length and stride must be at least 1"),
    ):
        with pytest.raises(DatasetError, match=message):
            open_text(tmp_path / "a.txt", **{"length": 4, "unit": "characters", **options})
    (tmp_path / "a.txt").write_bytes(b"fine\n\xff\n")
    with pytest.raises(DatasetError, match=r"a\.txt, line 2: no UTF-8"):
        open_text(tmp_path / "a.txt", unit="characters")
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"text" * 100)[:-9])
    for name in ("cut.txt.gz", "nothing.txt"):
        with pytest.raises(DatasetError, match=rf"{name}: "):
            open_text(tmp_path / name)


def test_tiny_shakespeare() -> None:
    path = folder("tiny_shakespeare") / "input.txt.gz"
    text = gzip.decompress(path.read_bytes()).decode()
    data = open_text(path, length=64, unit="characters")
    assert data.alphabet == "".join(sorted(set(text)))
    assert len(data.alphabet) == 65
    assert len(data) == (len(text) - 1) // 64
    row = len(data) - 1
    assert (
        "".join(data.alphabet[token] for token in data.take(np.array([row]))["label"][0]) == text[row * 64 + 1 :][:64]
    )
    assert as_dataset(path).fields["input"].classes == ()
