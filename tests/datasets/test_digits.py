from __future__ import annotations

import gzip
import os
import time
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from archipel.datasets import DigitsByWriter, digits_by_writer
from archipel.errors import DatasetError

SOURCE = Path(__file__).parents[2].parent / "shared" / "data" / "mnist_by_writer"


@pytest.fixture(scope="module")
def digits() -> DigitsByWriter:
    return digits_by_writer()


@pytest.mark.sampled(every=3)
def test_shapes_types_and_who_is_in(digits: DigitsByWriter) -> None:
    assert len(digits) == 27_438
    assert digits.images.shape == (27_438, 28, 28)
    assert digits.images.dtype == digits.labels.dtype == digits.series.dtype == np.uint8
    assert digits.writers.dtype == np.int16
    assert np.array_equal(np.unique(digits.labels), np.arange(10))
    staff, pupils = digits.writers_in((0, 1)), digits.writers_in((4,))
    assert (len(staff), len(pupils)) == (82, 162)
    # NIST numbered the staff from 0 and the pupils from 2100.
    assert max(staff) < 2100 <= min(pupils)


@pytest.mark.sampled(every=3)
def test_decodes_fast_and_the_file_is_small() -> None:
    assert files("archipel.datasets").joinpath("digits_by_writer.xz").stat().st_size <= 3_600_000
    started = time.process_time()
    digits_by_writer()
    assert time.process_time() - started < 1.5


def test_equals_the_source_bit_for_bit(digits: DigitsByWriter) -> None:
    if not SOURCE.is_dir():
        message = f"the source of the package's digits is not at {SOURCE}"
        pytest.fail(message) if os.environ.get("CI") == "true" else pytest.skip(message)
    images = np.frombuffer(gzip.decompress((SOURCE / "train-images-idx3-ubyte.gz").read_bytes()), np.uint8, offset=16)
    labels = np.frombuffer(gzip.decompress((SOURCE / "train-labels-idx1-ubyte.gz").read_bytes()), np.uint8, offset=8)
    images = images.reshape(-1, 28, 28)
    with np.load(SOURCE / "writers.npz") as columns:
        writer, series, index = columns["train_writer"], columns["train_hsf"], columns["train_index"]
    compared = 0
    for number in np.unique(digits.writers):
        source_rows = np.flatnonzero(writer == number)
        source_rows = source_rows[np.argsort(index[source_rows])]
        rows = np.flatnonzero(digits.writers == number)
        assert digits.images[rows].tobytes() == images[source_rows].tobytes()
        assert digits.labels[rows].tobytes() == labels[source_rows].tobytes()
        assert digits.series[rows].tobytes() == series[source_rows].tobytes()
        compared += len(source_rows)
    assert compared == len(digits)


def test_of_gives_all_digits_of_the_writers_and_nothing_else(digits: DigitsByWriter) -> None:
    a, b = digits.writers_in((4,))[:2]
    own = digits.of([b, a, b])
    expected = [i for i, w in enumerate(digits.writers.tolist()) if w in (a, b)]
    np.testing.assert_array_equal(own.images, digits.images[expected])
    np.testing.assert_array_equal(own.labels, digits.labels[expected])
    assert set(own.writers.tolist()) == {a, b}
    assert not own.images.flags.writeable


def test_of_names_a_writer_who_is_absent(digits: DigitsByWriter) -> None:
    with pytest.raises(DatasetError, match="no digits of writer 9999"):
        digits.of([digits.writers_in((4,))[0], 9999])


def test_inputs_and_targets_are_what_networks_take(digits: DigitsByWriter) -> None:
    some = digits.take(np.array([5, 2]))
    inputs, targets = some.inputs(), some.targets()
    assert inputs.dtype == np.float32
    assert inputs.shape == (2, 1, 28, 28)
    assert targets.dtype == np.int64
    np.testing.assert_allclose(inputs[0, 0], digits.images[5].astype(np.float64) / 255, atol=1e-7)
    assert targets.tolist() == [digits.labels[5], digits.labels[2]]
    assert inputs.max() == 1.0
