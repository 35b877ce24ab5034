"""The file format of the digits by writer: one xz stream, written and read strictly.

Unpacked (`xz -d` does it), integers little-endian:

    magic      8 bytes, b"ARCDIGI1"
    digest    32 bytes, SHA-256 of everything after it
    writers    uint32, W
    digits     uint32, N
    writer     int16  [W], strictly ascending
    series     uint8  [W]
    count      uint16 [W], digits of each writer, at least 1; they add up to N
    label      uint8  [N], 0..9, the digits of one writer after those of another
    pixel      uint8  [N, 28, 28]

LZMA on the plain pixels gives the smallest file that the standard library can make: row or pixel differences, PNG's
predictors, bit planes and transposed layouts all give larger ones.
"""

from __future__ import annotations

import hashlib
import lzma
import struct
from importlib.resources import files
from importlib.resources.abc import Traversable

import numpy as np

from archipel.datasets.published.digits import DigitsByWriter
from archipel.errors import DatasetError

DATA_FILE = "digits_by_writer.xz"

MAGIC = b"ARCDIGI1"
SIDE = 28

# Limits of what a reader allocates. MNIST has 70,000 digits in all.
MAX_FILE_BYTES = 4_000_000
MAX_WRITERS = 1_024
MAX_DIGITS = 70_000
# LZMA needs its dictionary in memory, even for a small output.
MAX_DECODER_BYTES = 48 << 20

_HEADER = struct.Struct("<8s32sII")
_DIGEST_FROM = 8 + 32
_FILTERS = [
    {
        "id": lzma.FILTER_LZMA2,
        "preset": 9 | lzma.PRESET_EXTREME,
        "dict_size": 32 << 20,
        "lc": 4,
        "pb": 0,
        "nice_len": 273,
    }
]


def digits_by_writer() -> DigitsByWriter:
    """Handwritten digits: 27,438 of 244 writers, 82 census staff and 162 pupils.

    Takes about 0.3 s, and 80 MB of memory while it decodes. Raises DatasetError if the data file, which the package
    archipel-data brings, is missing or damaged.

    Example:
        digits = digits_by_writer()
        split = split_writers(digits, devices=20, seed=0)
        first = digits.of([split.devices[0]])
        x, y = first.inputs(), first.targets()
    """
    file = files("archipel.datasets").joinpath(DATA_FILE)
    if not file.is_file():
        raise DatasetError(
            "the digits by writer are not installed; install them with: pip install archipel-data "
            "(archipel[demo] brings them)"
        )
    return read_digits_file(file)


def encode_digits(digits: DigitsByWriter) -> bytes:
    """Encode digits as a file. The same digits give the same unpacked bytes on every machine.

    Raises DatasetError if the writers are not in ascending order, each with one series.
    """
    writers, first, counts = np.unique(digits.writers, return_index=True, return_counts=True)
    series = digits.series[first]
    in_order = np.array_equal(np.repeat(writers, counts), digits.writers)
    if not in_order or not np.array_equal(np.repeat(series, counts), digits.series):
        raise DatasetError("expected digits sorted by writer and one series per writer; sort them by writer first")
    body = b"".join(
        (
            struct.pack("<II", len(writers), len(digits)),
            writers.astype("<i2").tobytes(),
            series.astype("u1").tobytes(),
            counts.astype("<u2").tobytes(),
            digits.labels.tobytes(),
            digits.images.tobytes(),
        )
    )
    plain = MAGIC + hashlib.sha256(body).digest() + body
    return lzma.compress(plain, format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC32, filters=_FILTERS)


def decode_digits(data: bytes, name: str) -> DigitsByWriter:
    """Decode a file's bytes; `name` is the file's name, for errors.

    Checks sizes before allocating. Raises DatasetError for bytes that `encode_digits` does not write.
    """
    if len(data) > MAX_FILE_BYTES:
        raise _damage_error(name, f"expected at most {MAX_FILE_BYTES} bytes, it has {len(data)}")
    stream = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=MAX_DECODER_BYTES)
    try:
        header = _read_exactly(stream, data, _HEADER.size, name)
        magic, digest, writer_total, digit_total = _HEADER.unpack(header)
        if magic != MAGIC:
            raise _damage_error(name, f"expected it to begin with {MAGIC!r}, it begins with {magic!r}")
        if not 1 <= writer_total <= MAX_WRITERS or not writer_total <= digit_total <= MAX_DIGITS:
            raise _damage_error(
                name,
                f"expected at most {MAX_WRITERS} writers and {MAX_DIGITS} digits, at least one digit per writer; "
                f"it announces {writer_total} writers and {digit_total} digits",
            )
        # 5 bytes for each writer: int16, uint8 and uint16.
        body = _read_exactly(stream, b"", writer_total * 5 + digit_total * (1 + SIDE * SIDE), name)
        # One more byte, if there is any. It also lets the decoder read the end of the stream.
        if not stream.eof and stream.decompress(b"", max_length=1):
            raise _damage_error(name, "it is longer than it announces")
    except lzma.LZMAError as error:
        raise _damage_error(name, f"it cannot be unpacked ({error})") from error
    if not stream.eof or stream.unused_data:
        raise _damage_error(name, "expected exactly one xz stream")

    hashed = hashlib.sha256(header[_DIGEST_FROM:])
    hashed.update(body)
    if hashed.digest() != digest:
        raise _damage_error(name, f"expected SHA-256 {digest.hex()}, its content has {hashed.hexdigest()}")
    return _parse(body, writer_total, digit_total, name)


def read_digits_file(path: Traversable) -> DigitsByWriter:
    """Read a file of this format. Raises DatasetError if it is missing, unreadable or damaged."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise DatasetError(f"cannot read the data file {path}: {reason}; install archipel-data again") from error
    return decode_digits(data, str(path))


def _parse(body: bytes, writer_total: int, digit_total: int, name: str) -> DigitsByWriter:
    at = 0

    def array(dtype: str, count: int) -> np.ndarray:
        nonlocal at
        result = np.frombuffer(body, dtype, count, at)
        at += result.nbytes
        return result

    writers = array("<i2", writer_total)
    series = array("u1", writer_total)
    counts = array("<u2", writer_total)
    labels = array("u1", digit_total)
    images = array("u1", digit_total * SIDE * SIDE).reshape(digit_total, SIDE, SIDE)
    # In int64, where differences of int16 do not wrap.
    if np.any(np.diff(writers.astype(np.int64)) <= 0):
        raise _damage_error(name, "its writers are not in strictly ascending order")
    if counts.min() < 1 or counts.sum(dtype=np.int64) != digit_total:
        raise _damage_error(
            name, f"its writers have {counts.sum(dtype=np.int64)} digits together, it announces {digit_total}"
        )
    if labels.max() > 9:
        raise _damage_error(name, f"expected labels 0..9, it has {labels.max()}")
    per_digit = np.repeat(writers.astype(np.int16), counts), np.repeat(series, counts)
    # The other arrays are views of `body`, which are read-only already.
    for repeated in per_digit:
        repeated.flags.writeable = False
    return DigitsByWriter(images, labels, *per_digit)


def _read_exactly(stream: lzma.LZMADecompressor, data: bytes, size: int, name: str) -> bytes:
    parts: list[bytes] = []
    missing = size
    while missing and not stream.eof:
        part = stream.decompress(data, max_length=missing)
        if not part and stream.needs_input:
            break
        # The decoder has kept the input that it has not used yet.
        data = b""
        parts.append(part)
        missing -= len(part)
    if missing:
        raise _damage_error(name, f"it ends {missing} bytes (unpacked) too early")
    return b"".join(parts)


def _damage_error(name: str, what: str) -> DatasetError:
    return DatasetError(f"the data file {name} is damaged: {what}; install archipel-data again")
