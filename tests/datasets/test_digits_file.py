from __future__ import annotations

import hashlib
import lzma
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipel.datasets import DigitsByWriter
from archipel.datasets.published.digits_file import decode_digits, encode_digits, read_digits_file
from archipel.errors import DatasetError

CORPUS = Path(__file__).parent / "corpus"

DAMAGED = {
    "empty.xz": "too early",
    "cut_short.xz": "too early",
    "other_format.xz": "cannot be unpacked",
    "old_lzma.xz": "cannot be unpacked",
    "two_streams.xz": "exactly one xz stream",
    "trailing_bytes.xz": "exactly one xz stream",
    "other_magic.xz": "begin with b'ARCDIGI1'",
    "flipped_pixel.xz": "expected SHA-256",
    "other_digest.xz": "expected SHA-256 0000",
    "no_writers.xz": "announces 0 writers",
    "many_digits.xz": "announces 2 writers and 4294967295 digits",
    "many_writers.xz": "announces 1025 writers",
    "shorter_than_announced.xz": "too early",
    "longer_than_announced.xz": "longer than it announces",
    "large_dictionary.xz": "Memory usage limit exceeded",
    "descending_writers.xz": "strictly ascending",
    "same_writer_twice.xz": "strictly ascending",
    "writer_without_digits.xz": "digits together",
    "counts_do_not_add_up.xz": "6 digits together, it announces 5",
    "label_ten.xz": "labels 0..9",
}


@st.composite
def digit_sets(draw: st.DrawFn) -> DigitsByWriter:
    writers = sorted(draw(st.sets(st.integers(-(2**15), 2**15 - 1), min_size=1, max_size=5)))
    counts = [draw(st.integers(1, 4)) for _ in writers]
    series = [draw(st.integers(0, 255)) for _ in writers]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    total = sum(counts)
    return DigitsByWriter(
        rng.integers(0, 256, (total, 28, 28), dtype=np.uint8),
        rng.integers(0, 10, total, dtype=np.uint8),
        np.repeat(np.array(writers, np.int16), counts),
        np.repeat(np.array(series, np.uint8), counts),
    )


@settings(max_examples=15)
@given(digit_sets())
@pytest.mark.sampled(every=4)
def test_what_is_written_is_read(digits: DigitsByWriter) -> None:
    read = decode_digits(encode_digits(digits), "written")
    for name in ("images", "labels", "writers", "series"):
        expected, got = getattr(digits, name), getattr(read, name)
        assert got.dtype == expected.dtype
        assert not got.flags.writeable
        np.testing.assert_array_equal(got, expected)


def test_reads_a_file_that_another_writer_made() -> None:
    digits = read_digits_file(CORPUS / "sound.xz")
    assert digits.writers.tolist() == [3, 3, 2100, 2100, 2100]
    assert digits.series.tolist() == [0, 0, 4, 4, 4]
    assert digits.labels.tolist() == [1, 0, 9, 9, 2]
    assert digits.images[4].ravel()[:3].tolist() == [124, 131, 138]


def test_every_corpus_file_has_its_expectation() -> None:
    assert {path.name for path in CORPUS.iterdir()} == {"sound.xz", *DAMAGED}


@pytest.mark.parametrize(("name", "reason"), DAMAGED.items())
def test_a_damaged_file_is_refused_with_its_reason_and_remedy(name: str, reason: str) -> None:
    with pytest.raises(DatasetError) as caught:
        read_digits_file(CORPUS / name)
    message = str(caught.value)
    assert reason in message
    assert name in message
    assert "install archipel-data again" in message


@pytest.mark.parametrize("name", ["many_digits.xz", "shorter_than_announced.xz", "longer_than_announced.xz"])
def test_what_a_file_announces_or_unpacks_to_is_not_allocated(name: str) -> None:
    """The three announce 3.4 TB and 47 MB, or go on for 100 MB after their content."""
    tracemalloc.start()
    try:
        with pytest.raises(DatasetError):
            read_digits_file(CORPUS / name)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The read buffer (4 MB) and the LZMA dictionary that these files ask for (8 MiB) are all there is.
    assert peak < 13_000_000


def test_a_file_over_the_size_limit_is_refused() -> None:
    with pytest.raises(DatasetError, match="at most 4000000 bytes"):
        decode_digits(bytes(4_000_001), "large.xz")


@settings(max_examples=300)
@given(st.data())
@pytest.mark.sampled(every=4)
def test_mutations_of_the_compressed_file_are_refused_or_harmless(data: st.DataObject) -> None:
    _mutate_and_decode((CORPUS / "sound.xz").read_bytes(), data, compressed=True)


@settings(max_examples=300)
@given(st.data())
@pytest.mark.sampled(every=4)
def test_mutations_of_the_content_are_refused_or_harmless(data: st.DataObject) -> None:
    plain = bytearray(lzma.decompress((CORPUS / "sound.xz").read_bytes()))
    _mutate_and_decode(bytes(plain), data, compressed=False)


def _mutate_and_decode(original: bytes, data: st.DataObject, *, compressed: bool) -> None:
    mutated = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(mutated) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "insert"])):
            case "flip":
                mutated[at] ^= data.draw(st.integers(1, 255))
            case "cut":
                del mutated[at : at + data.draw(st.integers(1, 16))]
            case "insert":
                mutated[at:at] = data.draw(st.binary(min_size=1, max_size=16))
        if not mutated:
            break
    if not compressed:
        # With the digest made right, the checks behind it are reached.
        if data.draw(st.booleans()):
            mutated[8:40] = hashlib.sha256(mutated[40:]).digest()
        mutated = bytearray(lzma.compress(bytes(mutated), preset=0))
    try:
        digits = decode_digits(bytes(mutated), "mutated")
    except DatasetError:
        return
    assert len(digits.images) == len(digits.labels) == len(digits.writers) == len(digits.series)
    assert digits.labels.max() <= 9


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"cannot read the data file .*absent.xz: No such file"):
        read_digits_file(tmp_path / "absent.xz")


def test_digits_out_of_order_cannot_be_written() -> None:
    digits = read_digits_file(CORPUS / "sound.xz")
    with pytest.raises(DatasetError, match="sorted by writer"):
        encode_digits(digits.take(np.array([4, 0, 1, 2, 3])))
    two_series = DigitsByWriter(digits.images, digits.labels, digits.writers, np.arange(5, dtype=np.uint8))
    with pytest.raises(DatasetError, match="one series per writer"):
        encode_digits(two_series)


@pytest.mark.sampled(every=4)
def test_needs_nothing_that_is_large() -> None:
    code = (
        "import sys, archipel.datasets as d; d.digits_by_writer(); "
        "print(sorted({'onnx', 'torch', 'onnxruntime', 'pyarrow', 'flask'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
