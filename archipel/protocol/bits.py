"""Numbers of k bits one after the other, the low bits first: k bits take a k-th of what k bytes take."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_CHUNK = 1 << 15
"""Numbers at a time, a multiple of 8, that stay in the processor's cache."""


def packed_size(count: int, bits: int) -> int:
    """The bytes of so many numbers; what is left over of the last byte is 0."""
    return -(-count * bits // 8)


def pack_bits(numbers: NDArray[np.uint32], bits: int) -> bytes:
    """The low `bits` bits, from 1 to 32, of each number."""
    parts = [_pack(numbers[start : start + _CHUNK], bits) for start in range(0, numbers.size, _CHUNK)]
    return b"".join(parts)[: packed_size(numbers.size, bits)]


def unpack_bits(data: NDArray[np.uint8], count: int, bits: int) -> NDArray[np.uint32]:
    """The numbers, each below 2^bits, of `packed_size(count, bits)` bytes. It does not read the bits that are left."""
    numbers = np.empty(count, np.uint32)
    for start in range(0, count, _CHUNK):
        part = numbers[start : start + _CHUNK]
        # Eight numbers begin at every `bits` bytes. Each lies in an eight-byte word that begins with its first bit's
        # byte; the last words reach beyond the data.
        groups = -(-part.size // 8)
        raw = data[start * bits // 8 : packed_size(start + part.size, bits)].tobytes()
        raw += bytes(groups * bits + 8 - len(raw))
        for index in range(min(8, part.size)):
            offset, shift = divmod(index * bits, 8)
            words: NDArray[np.uint64] = np.ndarray(groups, "<u8", raw, offset, (bits,))
            found = (words >> np.uint64(shift)).astype(np.uint32) & np.uint32((1 << bits) - 1)
            part[index::8] = found[: -(-(part.size - index) // 8)]
    return numbers


def _pack(numbers: NDArray[np.uint32], bits: int) -> bytes:
    """The bytes of a chunk, filled up to a multiple of eight numbers with zeros."""
    groups = -(-numbers.size // 8)
    low = np.zeros((8, groups), np.uint64)
    for index in range(min(8, numbers.size)):
        column = numbers[index::8]
        low[index, : column.size] = column & np.uint32((1 << bits) - 1)
    # Eight numbers fill `bits` bytes, which are put together as words of eight bytes.
    words = np.zeros((-(-bits // 8), groups), np.uint64)
    for index in range(8):
        word, shift = divmod(index * bits, 64)
        words[word] |= low[index] << np.uint64(shift)
        if shift + bits > 64:
            words[word + 1] |= low[index] >> np.uint64(64 - shift)
    return np.ascontiguousarray(words.T).astype("<u8", copy=False).view(np.uint8)[:, :bits].tobytes()
