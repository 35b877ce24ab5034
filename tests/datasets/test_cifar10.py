from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from archipel.datasets import cifar10
from archipel.datasets.published.cifar10 import FILE
from archipel.errors import DatasetError, MissingExtraError


def jpeg(colour: tuple[int, int, int], side: int = 32, mode: str = "RGB") -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (side, side), colour).convert(mode).save(stream, "JPEG", quality=75)
    return stream.getvalue()


# Picture i is red of this strength, and of class i % 10, sorted as the published file is: train first, then test.
REDS = [10 * i for i in range(20)]


def columns(**changes: np.ndarray) -> dict[str, np.ndarray]:
    pictures = [jpeg((red, 0, 0)) for red in REDS]
    shared = next(i for i, some in enumerate(zip(*pictures)) if len(set(some)) > 1)
    rest = [picture[shared:] for picture in pictures]
    return {
        "header": np.frombuffer(pictures[0][:shared], np.uint8),
        "data": np.frombuffer(b"".join(rest), np.uint8),
        "offset": np.cumsum([0, *map(len, rest)]).astype(np.int64),
        "y": (np.arange(20) % 10).astype(np.uint8),
        "n_train": np.array(15),
    } | changes


def write(folder: Path, **changes: np.ndarray) -> Path:
    np.savez(folder / FILE, **columns(**changes))
    return folder


def test_pictures_are_decoded_and_divided(tmp_path: Path) -> None:
    splits = cifar10(write(tmp_path), seed=2, validation=4)
    assert [part.inputs.shape for part in (splits.train, splits.validation, splits.test)] == [
        (11, 3, 32, 32),
        (4, 3, 32, 32),
        (5, 3, 32, 32),
    ]
    found = []
    for part in (splits.train, splits.validation, splits.test):
        # JPEG keeps a flat colour to a few steps of 255; the reds are ten steps apart.
        rows = np.round(part.inputs[:, 0].mean(axis=(1, 2)) * 25.5).astype(int)
        assert part.labels.tolist() == (rows % 10).tolist()
        assert part.inputs[:, 1:].max() < 0.02
        found.append(set(rows.tolist()))
    assert found[2] == set(range(15, 20))
    assert found[0] | found[1] == set(range(15))
    assert len(found[0]) == 11
    other = cifar10(tmp_path, seed=3, validation=4)
    assert not np.array_equal(other.train.labels, splits.train.labels)
    assert np.array_equal(other.test.inputs, splits.test.inputs)


SOUND = columns()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_train": np.array(20)}, "n_train is 20 of 20 pictures"),
        ({"n_train": np.array(0)}, "n_train is 0"),
        ({"y": SOUND["y"] + np.uint8(1)}, r"expected labels 0\.\.9, it has 10"),
        ({"offset": SOUND["offset"][:-1]}, "expected 21 ascending offsets"),
        ({"offset": SOUND["offset"][::-1].copy()}, "ascending offsets"),
        ({"offset": SOUND["offset"] + 1}, "ascending offsets from 0"),
        ({"offset": np.repeat(SOUND["offset"][[0, -1]], [20, 1])}, "picture 0 cannot be decoded"),
        ({"data": SOUND["data"][::-1].copy()}, r"picture \d+ cannot be decoded"),
        ({"header": SOUND["header"][:100].copy()}, "picture 0 cannot be decoded"),
        ({"header": np.frombuffer(b"\x89PNG\r\n\x1a\n", np.uint8)}, "picture 0 cannot be decoded"),
    ],
)
def test_a_damaged_file_is_named_with_its_reason_and_remedy(
    tmp_path: Path, changes: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(DatasetError, match=message) as caught:
        cifar10(write(tmp_path, **changes), validation=4)
    assert FILE in str(caught.value)
    assert "put the published" in str(caught.value)


@pytest.mark.parametrize(("side", "mode"), [(33, "RGB"), (32, "L"), (32, "CMYK")])
def test_a_picture_of_another_kind_is_refused(tmp_path: Path, side: int, mode: str) -> None:
    one = jpeg((9, 9, 9), side, mode)
    odd = {
        "header": np.zeros(0, np.uint8),
        "data": np.frombuffer(one * 20, np.uint8),
        "offset": np.arange(21, dtype=np.int64) * len(one),
    }
    with pytest.raises(DatasetError, match=rf"picture 0 .*expected 32 x 32 RGB, it is \({side}, {side}\) {mode}"):
        cifar10(write(tmp_path, **odd), validation=4)


def test_a_picture_that_announces_a_gigantic_size_is_not_decoded(tmp_path: Path) -> None:
    one = bytearray(jpeg((9, 9, 9)))
    start = one.index(b"\xff\xc0")
    one[start + 5 : start + 9] = b"\xff\xdc\xff\xdc"  # 65500 x 65500 pixels, 12 GB
    odd = {
        "header": np.zeros(0, np.uint8),
        "data": np.frombuffer(bytes(one) * 20, np.uint8),
        "offset": np.arange(21, dtype=np.int64) * len(one),
    }
    with pytest.raises(DatasetError, match=r"picture 0 cannot be decoded .*pixels"):
        cifar10(write(tmp_path, **odd), validation=4)


def test_without_pillow_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match=r"Pillow is not installed; install it with: .*archipel\[demo\]"):
        cifar10(tmp_path, validation=4)


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=rf"{FILE}: No such file or directory; put the published"):
        cifar10(tmp_path)
