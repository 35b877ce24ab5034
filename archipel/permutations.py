"""Permutations that every runtime and every version of NumPy draws in the same way.

NumPy may change its generators' streams between versions, and a browser has others. So the order comes from a
counter-based hash on uint32 of seed, phase, epoch and position: position i of n gets a 32-bit key, and the order is
the positions sorted by key. The mixing function is a bijection of 32-bit words, so keys never collide. The browser
library has the same functions in TypeScript.
"""

from __future__ import annotations

import numpy as np

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9
# The multipliers and shifts of lowbias32 (Wellons 2018, "Prospecting for Hash Functions").
_M1 = 0x7FEB352D
_M2 = 0x846CA68B


def permutation(count: int, seed: int, phase: int, epoch: int) -> np.ndarray:
    """Positions 0 ... count - 1 in the order of (seed, phase, epoch), all below 2**32: int64 `[count]`."""
    first = _fold(seed, phase, epoch, 0)
    second = _fold(seed, phase, epoch, 1)
    # Adding (mod 2**32), xor and mixing are bijections each, so equal keys would need equal positions.
    keys = np.arange(count, dtype=np.uint32)
    keys += np.uint32(first)
    keys = lowbias32(lowbias32(keys) ^ np.uint32(second))
    return np.argsort(keys, kind="stable")


def permuted(positions: np.ndarray, count: int, seed: int, phase: int, epoch: int) -> np.ndarray:
    """What is at these positions of a permutation of 0 ... count - 1, without the rest of it: int64 `[positions]`.

    Takes time and memory for the positions alone, so `count` may be anything below 2**48. It is another permutation
    than `permutation` draws: a bijection of the k-bit words, of which those from `count` on are mapped again until they
    are below it (cycle walking, Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains").
    """
    bits = max(int(count - 1).bit_length(), 2)
    words = np.asarray(positions).astype(np.uint64)
    keys = [_fold(seed, phase, epoch, word) | _fold(seed, phase, epoch, word + 1) << 32 for word in (2, 4, 6, 8)]
    mapped = _mix_words(words, bits, keys)
    # k bits are at most twice as many words as needed, so half of them on average go round once more.
    while (outside := np.flatnonzero(mapped >= count)).size:
        mapped[outside] = _mix_words(mapped[outside], bits, keys)
    return mapped.astype(np.int64)


def draw_bits(seed: int, stream: int, count: int) -> np.ndarray:
    """32 random bits for each counter from 0 to count - 1: uint32 `[count]`.

    Those of the streams `stream` and `stream + 1` of step graphs (archipel/training/hashing.py).
    """
    # Arrays, not scalars, as NumPy warns of scalars that overflow.
    base = lowbias32(np.array([seed], np.uint32))
    a, b = (lowbias32(base ^ np.uint32(stream + i)) for i in (0, 1))
    return lowbias32(np.arange(count, dtype=np.uint32) ^ a, b)


def _mix_words(words: np.ndarray, bits: int, keys: list[int]) -> np.ndarray:
    # Each line is a bijection of words of so many bits: xor with a key, an odd factor mod 2**bits, an xor with a
    # shift to the right.
    mask, half = (1 << bits) - 1, np.uint64((bits + 1) // 2)
    for key in keys:
        words = words ^ np.uint64(key & mask)
        words *= np.uint64((_GOLDEN << 32 | _M1) | 1)
        words &= np.uint64(mask)
        words ^= words >> half
        words *= np.uint64((_M2 << 32 | _M1) | 1)
        words &= np.uint64(mask)
        words ^= words >> half
    return words


def _fold(*words: int) -> int:
    value = 0
    for word in words:
        value = _mix(((value ^ word) + _GOLDEN) & _MASK)
    return value


def _mix(word: int) -> int:
    word ^= word >> 16
    word = word * _M1 & _MASK
    word ^= word >> 15
    word = word * _M2 & _MASK
    return word ^ word >> 16


def lowbias32(words: np.ndarray, key: np.ndarray | None = None) -> np.ndarray:
    """Each word (uint32) mixed, in a new array; `key`, with which a word is xored halfway, broadcasts to them."""
    # As _mix; uint32 arithmetic wraps by itself. The first line makes a copy, the others work in place.
    words = words ^ (words >> np.uint32(16))
    words *= np.uint32(_M1)
    words ^= words >> np.uint32(15)
    if key is not None:
        words ^= key
    words *= np.uint32(_M2)
    words ^= words >> np.uint32(16)
    return words
