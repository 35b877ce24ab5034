"""The readers on the published files, against what their publishers say of them. Skipped where the files are absent."""

from __future__ import annotations

import gzip
import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from archipel.datasets import LabelledSplits, cifar10, fashion_mnist, har_windows, mnist

DATA = Path(__file__).parents[2].parent / "shared" / "data"


def folder(name: str) -> Path:
    if not (DATA / name).is_dir():
        message = f"the published data set is not at {DATA / name}"
        pytest.fail(message) if os.environ.get("CI") == "true" else pytest.skip(message)
    return DATA / name


def check_parts(splits: LabelledSplits, item: tuple[int, ...], counts: tuple[int, int, int]) -> None:
    for part, count in zip((splits.train, splits.validation, splits.test), counts, strict=True):
        assert part.inputs.shape == (count, *item)
        assert part.inputs.dtype == np.float32
        assert part.inputs.flags.c_contiguous
        assert not part.inputs.flags.writeable
        assert part.labels.shape == (count,)
        assert part.labels.dtype == np.int64


def as_published(path: Path, offset: int) -> np.ndarray:
    return np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8, offset=offset)


@pytest.mark.parametrize(("reader", "name"), [(mnist, "mnist_by_writer"), (fashion_mnist, "fashion_mnist")])
@pytest.mark.sampled(every=4)
def test_grey_pictures_are_those_of_the_files(reader: object, name: str) -> None:
    splits = reader(folder(name))  # type: ignore[operator]
    check_parts(splits, (1, 28, 28), (55_000, 5_000, 10_000))
    images = as_published(DATA / name / "t10k-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28)
    labels = as_published(DATA / name / "t10k-labels-idx1-ubyte.gz", 8)
    assert np.array_equal(np.round(splits.test.inputs[:, 0] * 255), images)
    assert np.array_equal(splits.test.labels, labels)
    published = np.bincount(as_published(DATA / name / "train-labels-idx1-ubyte.gz", 8))
    assert np.array_equal(np.bincount(splits.train.labels) + np.bincount(splits.validation.labels), published)
    assert len(splits.classes) == 10


@pytest.mark.sampled(every=4)
def test_windows_are_as_many_as_published_and_no_person_is_in_two_parts() -> None:
    splits = har_windows(folder("hapt_har"))
    train, validation, test = splits.people
    assert test == (2, 4, 9, 10, 12, 13, 18, 20, 24)  # of the UCI HAR data set
    assert (len(train), len(validation)) == (17, 4)
    assert sorted(train + validation + test) == list(range(1, 31))
    parts = (splits.train, splits.validation, splits.test)
    check_parts(splits, (6, 128), tuple(len(part) for part in parts))
    assert sum(np.bincount(part.labels) for part in parts).tolist() == [1658, 1465, 1319, 1738, 1922, 1911]
    np.testing.assert_allclose(splits.train.inputs.mean(axis=(0, 2)), 0, atol=1e-4)
    np.testing.assert_allclose(splits.train.inputs.std(axis=(0, 2)), 1, atol=1e-4)


@pytest.mark.sampled(every=3)
def test_a_window_is_the_signal_in_its_units() -> None:
    splits = har_windows(folder("hapt_har"), seed=3)
    with np.load(DATA / "hapt_har" / "hapt_raw.npz", allow_pickle=False) as raw:
        recording = int(np.flatnonzero(raw["user"] == splits.people[2][0])[0])
        begin, end = raw["offset"][recording : recording + 2]
        signal, activity = raw["signal"][begin:end] * raw["scale"], raw["activity"][begin:end]
    starts = range(0, len(signal) - 127, 64)
    first = next(s for s in starts if 1 <= activity[s] <= 6 and (activity[s : s + 128] == activity[s]).all())
    window = splits.test.inputs[0] * splits.deviation[:, None] + splits.mean[:, None]
    np.testing.assert_allclose(window.T, signal[first : first + 128], atol=1e-5)
    assert splits.test.labels[0] == activity[first] - 1
    assert 0.9 < np.linalg.norm(window[:3], axis=0).mean() < 1.1  # gravity


@pytest.mark.slow
def test_colour_pictures_are_those_of_the_file() -> None:
    splits = cifar10(folder("cifar10"))
    check_parts(splits, (3, 32, 32), (45_000, 5_000, 10_000))
    assert np.bincount(splits.test.labels).tolist() == [1000] * 10
    assert (np.bincount(splits.train.labels) + np.bincount(splits.validation.labels)).tolist() == [5000] * 10
    with np.load(DATA / "cifar10" / "cifar10_jpeg_60000.npz", allow_pickle=False) as raw:
        header, data, offset = raw["header"].tobytes(), raw["data"].tobytes(), raw["offset"]
    # Every test picture must be there once, with its own label.
    keys = {(part * 255).round().astype(np.uint8).tobytes(): label for part, label in zip(*vars(splits.test).values())}
    for row in range(50_000, 60_000, 97):
        pixels = np.asarray(Image.open(io.BytesIO(header + data[offset[row] : offset[row + 1]])))
        assert keys[pixels.transpose(2, 0, 1).tobytes()] == (row - 50_000) // 1000
