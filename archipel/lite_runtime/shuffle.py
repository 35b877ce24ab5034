"""The order of the local data in batches: the permutation of `archipel.permutations`, cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from archipel.permutations import permutation


class Batch(NamedTuple):
    """`indices` into the local data, int64 `[rows]`; `epoch` counts from 0 within the phase."""

    epoch: int
    indices: np.ndarray
    last_of_epoch: bool


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
