"""Numbers of k bits one after the other, the low bits first: k bits take a k-th of what k bytes take."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_CHUNK = 1 << 15
"""Numbers at a time, a multiple of 8: unpacked, each takes 32 bytes."""


def packed_size(count: int, bits: int) -> int:
    """The bytes of so many numbers; what is left over of the last byte is 0."""
    return -(-count * bits // 8)


def pack_bits(numbers: NDArray[np.uint32], bits: int) -> bytes:
    """The low `bits` bits, from 1 to 32, of each number."""
    parts = []
    for start in range(0, numbers.size, _CHUNK):
        words = numbers[start : start + _CHUNK].astype("<u4").view(np.uint8).reshape(-1, 4)
        single = np.unpackbits(words, axis=1, bitorder="little")[:, :bits]
        parts.append(np.packbits(single.reshape(-1), bitorder="little").tobytes())
    return b"".join(parts)


def unpack_bits(data: NDArray[np.uint8], count: int, bits: int) -> NDArray[np.uint32]:
    """The numbers, each below 2^bits, of `packed_size(count, bits)` bytes. It does not read the bits that are left."""
    numbers = np.empty(count, np.uint32)
    for start in range(0, count, _CHUNK):
        stop = min(start + _CHUNK, count)
        raw = data[start * bits // 8 : packed_size(stop, bits)]
        single = np.zeros((stop - start, 32), np.uint8)
        single[:, :bits] = np.unpackbits(raw, count=(stop - start) * bits, bitorder="little").reshape(-1, bits)
        numbers[start:stop] = np.packbits(single, axis=1, bitorder="little").view("<u4").reshape(-1)
    return numbers
