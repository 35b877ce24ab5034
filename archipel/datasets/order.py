"""In which order an epoch has the examples: a pure function of seed and epoch, the same in every process."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from archipel.datasets.dataset import Arrays, Dataset, Stream
from archipel.errors import DatasetError
from archipel.permutations import permutation, permuted

WINDOW = 8
# Up to so many examples the whole permutation is drawn at once (a tenth of a second, 8 bytes an example). Beyond it
# each batch draws its own part.
_DRAWN_AT_ONCE = 1 << 20
# The `phase` of the permutations: of all examples, of the blocks, and from 2 on of the examples in each window.
_ALL, _BLOCKS, _WINDOWS = 0, 1, 2


class Order:
    """The numbers of the examples by their place in an epoch.

    A data set with blocks is read a window of blocks at a time: the blocks come in a random order, some at a time, and
    the examples of these in a random order. Other data sets are shuffled as a whole.
    """

    def __init__(self, dataset: Dataset, shuffle: bool, seed: int) -> None:
        self._count, self._shuffle, self._seed = len(dataset), shuffle, seed
        self._blocks = _blocks(dataset) if shuffle else None
        # Half of what it can hold: batches that are prefetched may lie in the next window already.
        self._held = max(1, int(getattr(dataset, "window", 0) or WINDOW) // 2)
        self._drawn: tuple[object, NDArray[np.intp]] = (None, np.empty(0, np.intp))

    def rows(self, epoch: int, start: int, stop: int) -> NDArray[np.intp]:
        """The examples at places start ... stop - 1 of this epoch."""
        if not self._shuffle:
            return np.arange(start, stop, dtype=np.intp)
        if self._blocks is not None:
            return self._in_windows(self._blocks, epoch, start, stop)
        if self._count > _DRAWN_AT_ONCE:
            return permuted(np.arange(start, stop), self._count, self._seed, _ALL, epoch)
        if self._drawn[0] != epoch:
            self._drawn = (epoch, permutation(self._count, self._seed, _ALL, epoch))
        return self._drawn[1][start:stop]

    def _in_windows(self, blocks: NDArray[np.intp], epoch: int, start: int, stop: int) -> NDArray[np.intp]:
        order = permutation(len(blocks) - 1, self._seed, _BLOCKS, epoch)
        sizes = np.diff(blocks)[order]
        ends = np.append(np.cumsum(sizes)[self._held - 1 : -1 : self._held], self._count)
        parts, first = [], int(np.searchsorted(ends, start, side="right"))
        for window in range(first, int(np.searchsorted(ends, stop, side="left")) + 1):
            begin = int(ends[window - 1]) if window else 0
            if self._drawn[0] != (epoch, window):
                chosen = order[window * self._held : (window + 1) * self._held]
                rows = np.concatenate([np.arange(blocks[block], blocks[block + 1]) for block in chosen])
                mixed = rows[permutation(len(rows), self._seed, _WINDOWS + window, epoch)]
                self._drawn = ((epoch, window), mixed)
            parts.append(self._drawn[1][max(start - begin, 0) : stop - begin])
        return np.concatenate(parts)


def shuffled_pieces(
    stream: Stream, epoch: int, start: int, *, buffer: int, shuffle: bool, seed: int
) -> Iterator[Arrays]:
    """The examples of a stream from place `start` of an epoch on, `buffer` at a time, each such piece shuffled.

    An example moves by less than `buffer` places. So no state but the place is needed to go on exactly, and what was
    before the present buffer is skipped by the stream itself.
    """
    number, inside = divmod(start, buffer)
    for piece in in_pieces(stream.read(number * buffer), buffer):
        if shuffle:
            rows = permutation(count_of(piece), seed, _WINDOWS + number, epoch)
            piece = {field: array[rows] for field, array in piece.items()}
        if inside:
            piece = {field: array[inside:] for field, array in piece.items()}
        if count_of(piece):
            yield piece
        number, inside = number + 1, 0


def in_pieces(source: Iterator[Arrays], size: int) -> Iterator[Arrays]:
    """The same examples in pieces of `size`; the last may be smaller."""
    waiting: list[Arrays] = []
    count = 0
    for piece in source:
        waiting.append(piece)
        count += count_of(piece)
        if count < size:
            continue
        joined, done = join(waiting), 0
        while count - done >= size:
            yield {field: array[done : done + size] for field, array in joined.items()}
            done += size
        waiting = [{field: array[done:] for field, array in joined.items()}]
        count -= done
    if count:
        yield join(waiting)


def join(pieces: list[Arrays]) -> Arrays:
    """The examples of all pieces, one after the other. Shorter axes are filled up with zeros."""
    if len(pieces) == 1:
        return pieces[0]
    joined: Arrays = {}
    for field in pieces[0]:
        arrays = [piece[field] for piece in pieces]
        if len({array.shape[1:] for array in arrays}) > 1:
            longest = [max(sizes) for sizes in zip(*(array.shape[1:] for array in arrays))]
            arrays = [
                np.pad(array, [(0, 0), *((0, most - size) for most, size in zip(longest, array.shape[1:]))])
                for array in arrays
            ]
        joined[field] = np.concatenate(arrays)
    return joined


def count_of(piece: Arrays) -> int:
    """How many examples a piece has."""
    return len(next(iter(piece.values())))


def _blocks(dataset: Dataset) -> NDArray[np.intp] | None:
    found = getattr(dataset, "blocks", None)
    if found is None:
        return None
    blocks = np.asarray(found).astype(np.intp)
    if blocks.ndim != 1 or len(blocks) < 2 or blocks[0] or blocks[-1] != len(dataset) or (np.diff(blocks) < 0).any():
        raise DatasetError(f"blocks must ascend from 0 to the {len(dataset)} examples, got {blocks.tolist()[:8]}")
    return blocks
