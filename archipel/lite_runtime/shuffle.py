"""The order of the local data: a permutation that every runtime draws in the same way.

NumPy may change its generators' streams between versions, and a browser has others. So the order comes from a
counter-based hash on uint32 of seed, phase, epoch and position: position i of n gets a 32-bit key, and the order is
the positions sorted by key. The mixing function is a bijection of 32-bit words, so keys never collide. The browser
library has the same functions in TypeScript.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9
# The multipliers and shifts of lowbias32 (Wellons 2018, "Prospecting for Hash Functions").
_M1 = 0x7FEB352D
_M2 = 0x846CA68B


class Batch(NamedTuple):
    """`indices` into the local data, int64 `[rows]`; `epoch` counts from 0 within the phase."""

    epoch: int
    indices: np.ndarray
    last_of_epoch: bool


def permutation(count: int, seed: int, phase: int, epoch: int) -> np.ndarray:
    """Positions 0 ... count - 1 in the order of (seed, phase, epoch), all below 2**32: int64 `[count]`."""
    first = _fold(seed, phase, epoch, 0)
    second = _fold(seed, phase, epoch, 1)
    # Adding (mod 2**32), xor and mixing are bijections each, so equal keys would need equal positions.
    keys = np.arange(count, dtype=np.uint32)
    keys += np.uint32(first)
    keys = _mix_array(_mix_array(keys) ^ np.uint32(second))
    return np.argsort(keys, kind="stable")


def batches(
    count: int,
    batch_size: int,
    *,
    epochs: int | None,
    steps: int | None,
    shuffle: bool,
    seed: int,
    phase: int,
    whole: bool,
    skip: int = 0,
) -> Iterator[Batch]:
    """Cut the data into batches for `epochs` passes or for `steps` batches (as many passes as they need).

    The last batch of a pass has the remaining rows; with `whole`, which asks for batches of one size, it is left out.
    The first `skip` batches are left out too, so that interrupted training can continue after them.
    """
    stop = count - count % batch_size if whole else count
    if not stop:
        return
    step = skip
    # Batches per pass, rounded up: -(-a // b).
    epoch, done = divmod(skip, -(-stop // batch_size))
    # The order depends on the epoch's number only, so a run that skips batches has the order of an uninterrupted one.
    while (epoch < epochs) if epochs is not None else (step < (steps or 0)):
        order = permutation(count, seed, phase, epoch) if shuffle else np.arange(count)
        for first in range(done * batch_size, stop, batch_size):
            if epochs is None and step == steps:
                return
            yield Batch(epoch, order[first : first + batch_size], first + batch_size >= stop)
            step += 1
        epoch, done = epoch + 1, 0


def group_batches(source: Iterable[Batch], size: int, rows: int) -> Iterator[list[Batch]]:
    """Groups of `size` batches of `rows` examples within one pass; other batches come in groups of one."""
    group: list[Batch] = []
    for batch in source:
        group.append(batch)
        if len(batch.indices) == rows and len(group) == size:
            yield group
            group = []
        # The pass ends, or a smaller batch comes: a graph of `size` steps cannot run what has been collected.
        elif len(batch.indices) != rows or batch.last_of_epoch:
            yield from ([each] for each in group)
            group = []
    # What is left where the source ended after a number of steps.
    yield from ([each] for each in group)


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


def _mix_array(words: np.ndarray) -> np.ndarray:
    # As _mix; uint32 arithmetic wraps by itself. The first line makes a copy, the others work in place.
    words = words ^ (words >> np.uint32(16))
    words *= np.uint32(_M1)
    words ^= words >> np.uint32(15)
    words *= np.uint32(_M2)
    words ^= words >> np.uint32(16)
    return words
