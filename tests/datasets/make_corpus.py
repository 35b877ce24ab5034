"""Writes tests/datasets/corpus: one sound digits file and damaged ones. A second writer of the format, on struct alone.

python tests/datasets/make_corpus.py
"""

from __future__ import annotations

import hashlib
import lzma
import struct
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
TINY = [(3, 0, [1, 0]), (2100, 4, [9, 9, 2])]


def pixels(row: int) -> bytes:
    """A picture that differs from digit to digit."""
    return bytes((row * 31 + i * 7) % 256 for i in range(784))


def plain(
    writers: list[tuple[int, int, list[int]]] = TINY,
    *,
    magic: bytes = b"ARCDIGI1",
    counts: list[int] | None = None,
    totals: tuple[int, int] | None = None,
    digest: bytes | None = None,
) -> bytes:
    labels = [label for _, _, own in writers for label in own]
    counts = counts or [len(own) for _, _, own in writers]
    body = struct.pack("<II", *(totals or (len(writers), len(labels))))
    body += b"".join(struct.pack("<h", writer) for writer, _, _ in writers)
    body += bytes(series for _, series, _ in writers)
    body += b"".join(struct.pack("<H", count) for count in counts)
    body += bytes(labels) + b"".join(pixels(row) for row in range(len(labels)))
    return magic + (digest or hashlib.sha256(body).digest()) + body


def files() -> dict[str, bytes]:
    sound = lzma.compress(plain())
    zeros = lzma.compress(plain() + bytes(100_000_000), preset=1)
    flipped = bytearray(plain())
    flipped[-1] ^= 1
    large_dictionary = [{"id": lzma.FILTER_LZMA2, "dict_size": 128 << 20}]
    return {
        "sound.xz": sound,
        "empty.xz": b"",
        "cut_short.xz": sound[:-40],
        "other_format.xz": b"\x93NUMPY" + sound[6:],
        "old_lzma.xz": lzma.compress(plain(), format=lzma.FORMAT_ALONE),
        "two_streams.xz": sound + sound,
        "trailing_bytes.xz": sound + b"more",
        "other_magic.xz": lzma.compress(plain(magic=b"ARCDIGI2")),
        "flipped_pixel.xz": lzma.compress(bytes(flipped)),
        "other_digest.xz": lzma.compress(plain(digest=bytes(32))),
        "no_writers.xz": lzma.compress(plain([])),
        "many_digits.xz": lzma.compress(plain(totals=(2, 2**32 - 1))),
        "many_writers.xz": lzma.compress(plain(totals=(1025, 2000))),
        "shorter_than_announced.xz": lzma.compress(plain(totals=(2, 60_000))),
        "longer_than_announced.xz": zeros,
        "large_dictionary.xz": lzma.compress(plain(), format=lzma.FORMAT_XZ, filters=large_dictionary),
        "descending_writers.xz": lzma.compress(plain(TINY[::-1])),
        "same_writer_twice.xz": lzma.compress(plain([TINY[0], TINY[0]])),
        "writer_without_digits.xz": lzma.compress(plain(counts=[5, 0])),
        "counts_do_not_add_up.xz": lzma.compress(plain(counts=[2, 4])),
        "label_ten.xz": lzma.compress(plain([(3, 0, [10])])),
    }


if __name__ == "__main__":
    CORPUS.mkdir(exist_ok=True)
    for name, data in files().items():
        (CORPUS / name).write_bytes(data)
