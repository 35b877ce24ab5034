"""Random rotations of vectors: signs, then the Walsh-Hadamard transform of blocks (Suresh et al. 2017, section 3).

An element of a rotated block is a sum of all the block's elements with random signs, divided by the root of their
number. So the rotated elements are about equal in size even where a few of the update's are far larger than the others,
and rounding to few steps loses less (Suresh, Yu, Kumar, McMahan: "Distributed mean estimation with limited
communication"). With a block of n elements and the norm c, one of the rotated ones is beyond t c / sqrt(n) with a
probability of 2 exp(-t^2 / 2) at most (Hoeffding).

The vector is padded with zeros to `blocks` x `block` elements. Element i is in block i modulo `blocks`: each block has
its share of every layer, so blocks have about equal norms.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from archipel.bundle.roles import Rotation
from archipel.permutations import draw_bits

FIRST = 0xF0000000
"""The number of the first stream of bits of a round's seed; streams are two apart."""
SIGNS, ROUNDING, PLACES = (FIRST + 2 * i for i in range(3))
MOST, LEAST = 1 << 14, 1 << 8
"""The largest and, for vectors with more elements, the smallest block."""
_PADDING = 1 / 16
SPREAD = 4.0
"""The range of a rotated element, in units of clip / sqrt(elements): the deviation of one of the longest update."""


def choose_block(size: int) -> int:
    """The number of elements of a block, a power of two, for a vector of `size` elements.

    The larger, the more evenly the rotation spreads what is large; so the largest that pads by at most a sixteenth.
    """
    block = MOST
    while block > LEAST and _padded(size, block) > size * (1 + _PADDING):
        block //= 2
    while block // 2 >= max(size, 2):
        block //= 2
    return block


def draw_signs(seed: int, count: int) -> NDArray[np.float64]:
    """`[count]` numbers of 1 or -1, which follow from the round's seed."""
    top = (draw_bits(seed, SIGNS, count) >> np.uint32(31)).astype(np.float64)
    return 1.0 - 2.0 * top


def rotate(vector: NDArray[np.float64], block: int, seed: int) -> NDArray[np.float64]:
    """The rotated vector, `[blocks, block]`, of one with `[size]` elements."""
    blocks = -(-vector.size // block)
    padded = np.zeros(blocks * block)
    padded[: vector.size] = vector
    rows = padded.reshape(block, blocks).T
    return _transform(rows * draw_signs(seed, rows.size).reshape(rows.shape))


def draw_places(seed: int, count: int, taken: int) -> NDArray[np.int64]:
    """`[taken]` different places below `count`, which follow from the round's seed: those of the largest bits."""
    # The hash is a bijection of the counter, so no two are equal.
    return np.argsort(draw_bits(seed, PLACES, count))[::-1][:taken]


def unrotate(vector: NDArray[np.float64], how: Rotation, size: int, seed: int) -> NDArray[np.float64]:
    """The inverse of `rotate`, which is linear: of a sum of vectors that were rotated by one seed, their sum.

    Arguments:
        vector: rotated, in the shape of the entry that `how` describes.
        how: of the entry.
        size: the number of elements of the result.
        seed: the round's.

    Of elements that were not taken it takes 0.
    """
    count = _padded(size, how.block)
    if how.taken:
        line = np.zeros(count)
        line[draw_places(seed, count, how.taken)] = vector
        vector = line
    rows = vector.reshape(-1, how.block)
    return (_transform(rows) * draw_signs(seed, count).reshape(rows.shape)).T.reshape(-1)[:size]


def _padded(size: int, block: int) -> int:
    return -(-size // block) * block


def _transform(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """The Walsh-Hadamard transform of each row divided by the root of its length, which is its own inverse."""
    count, block = rows.shape
    half = 1
    while half < block:
        pairs = rows.reshape(count, block // (2 * half), 2, half)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        rows = np.stack([first + second, first - second], axis=2).reshape(count, block)
        half *= 2
    return np.asarray(rows / np.sqrt(block))
