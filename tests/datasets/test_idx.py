from __future__ import annotations

import gzip
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipel.datasets import fashion_mnist, mnist
from archipel.datasets.published.idx import read_idx
from archipel.errors import DatasetError


def idx(array: np.ndarray, *, magic: bytes | None = None, shape: tuple[int, ...] | None = None) -> bytes:
    shape = array.shape if shape is None else shape
    return (magic or bytes((0, 0, 8, len(shape)))) + struct.pack(f">{len(shape)}I", *shape) + array.tobytes()


def write_folder(folder: Path, train: int = 12, test: int = 4) -> dict[str, np.ndarray]:
    """A small data set; picture i of a part has the pixels (i + j) % 256."""
    arrays = {}
    for part, count in (("train", train), ("t10k", test)):
        pixels = (np.arange(count)[:, None] + np.arange(784)).astype(np.uint8).reshape(count, 28, 28)
        arrays[part] = pixels
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(pixels)))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.arange(count, dtype=np.uint8) % 10)))
    return arrays


def test_a_seed_divides_the_training_part_and_never_the_test_part(tmp_path: Path) -> None:
    arrays = write_folder(tmp_path)
    splits = mnist(tmp_path, seed=1, validation=3)
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [9, 3, 4]
    # The first pixel of picture i is i.
    rows = [np.round(part.inputs[:, 0, 0, 0] * 255).astype(int) for part in (splits.train, splits.validation)]
    assert sorted(np.concatenate(rows).tolist()) == list(range(12))
    for own, part in zip(rows, (splits.train, splits.validation)):
        assert np.array_equal(part.labels, own % 10)
        np.testing.assert_allclose(part.inputs[:, 0], arrays["train"][own] / 255, rtol=1e-6)
    np.testing.assert_allclose(splits.test.inputs[:, 0], arrays["t10k"] / 255, rtol=1e-6)
    again, other = mnist(tmp_path, seed=1, validation=3), mnist(tmp_path, seed=2, validation=3)
    assert np.array_equal(again.train.inputs, splits.train.inputs)
    assert not np.array_equal(other.train.inputs, splits.train.inputs)
    assert np.array_equal(other.test.inputs, splits.test.inputs)
    flat = mnist(tmp_path, seed=1, validation=3, flat=True)
    assert np.array_equal(flat.train.inputs, splits.train.inputs.reshape(9, 784))


@pytest.mark.parametrize("validation", [0, 12, -1])
def test_a_part_without_examples_is_an_error(tmp_path: Path, validation: int) -> None:
    write_folder(tmp_path)
    with pytest.raises(
        DatasetError, match=rf"1\.\.11 validation examples of the 12 .* Fashion-MNIST, got {validation}"
    ):
        fashion_mnist(tmp_path, validation=validation)


LABELS = np.arange(12, dtype=np.uint8) % 10


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "begins with nothing"),
        (b"not gzip", "[Nn]ot a gzipped file"),
        (gzip.compress(idx(LABELS))[:-12], "cannot read the data file"),
        (gzip.compress(idx(LABELS, magic=b"\0\0\x0d\1")), "begins with 00000801, it begins with 00000d01"),
        (gzip.compress(idx(LABELS.reshape(12, 1))), "begins with 00000801, it begins with 00000802"),
        (gzip.compress(idx(LABELS, shape=(11,))), r"announces \[11\], 11 bytes, and has more"),
        (gzip.compress(idx(LABELS, shape=(13,))), r"announces \[13\], 13 bytes, and has 12"),
        (gzip.compress(idx(LABELS, shape=(0,))), r"expected 1\.\.1000000 items of \[\], it announces \[0\]"),
        (
            gzip.compress(idx(LABELS, shape=(2**32 - 1,))),
            r"expected 1\.\.1000000 items of \[\], it announces \[4294967295\]",
        ),
        (gzip.compress(idx(LABELS, shape=(1_000_001,))), r"expected 1\.\.1000000 items"),
        (gzip.compress(idx(LABELS[:7])), "has 12 images and train-labels-idx1-ubyte.gz 7 labels"),
        (gzip.compress(idx(LABELS + np.uint8(1))), r"expected labels 0\.\.9, it has 10"),
    ],
)
def test_a_damaged_file_is_named_with_its_reason_and_remedy(tmp_path: Path, content: bytes, message: str) -> None:
    write_folder(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(content)
    with pytest.raises(DatasetError, match=message) as caught:
        mnist(tmp_path, validation=3)
    assert "train-labels-idx1-ubyte.gz" in str(caught.value)
    assert "put the published MNIST files there again" in str(caught.value)


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(
        DatasetError, match=r"train-images-idx3-ubyte\.gz: No such file or directory; put the published"
    ):
        mnist(tmp_path)


@pytest.mark.sampled(every=4)
def test_what_a_file_unpacks_to_is_not_kept_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(idx(LABELS) + bytes(200_000_000)))
    tracemalloc.start()
    try:
        with pytest.raises(DatasetError, match="and has more"):
            read_idx(path, (), "take another")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000


@settings(max_examples=200)
@given(st.data())
@pytest.mark.sampled(every=4)
def test_mutations_are_refused_or_harmless(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    content = bytearray(idx(LABELS))
    compressed = data.draw(st.booleans())
    mutated = bytearray(gzip.compress(bytes(content), mtime=0)) if compressed else content
    for _ in range(data.draw(st.integers(1, 4))):
        mutated[data.draw(st.integers(0, len(mutated) - 1))] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.getbasetemp() / "mutated.gz"
    path.write_bytes(bytes(mutated) if compressed else gzip.compress(bytes(mutated), compresslevel=1))
    try:
        array = read_idx(path, (), "take another")
    except DatasetError:
        return
    assert array.dtype == np.uint8
    assert array.shape == (12,)
