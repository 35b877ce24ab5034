"""Data sets in files that are decoded a block at a time: a row group, a record batch."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipel.datasets.dataset import Arrays, Field
from archipel.datasets.ragged import Ragged, stack
from archipel.errors import DatasetError

MEMORY = 256 << 20

Block = Mapping[str, NDArray[Any] | Ragged]


class BlockDataset(ABC):
    """Examples in blocks, of which the most recently used stay decoded within a limit of memory.

    Who inherits from it decodes a block in `_read_block` and names rows in `locate`.

    Arguments:
        fields: the fields by name.
        sizes: the number of examples in each block.
        block_bytes: how many bytes the largest block takes when it is decoded.
        memory: bytes for decoded blocks; two blocks are held in any case.
    """

    def __init__(self, fields: Mapping[str, Field], sizes: list[int], block_bytes: int, memory: int) -> None:
        self.fields = fields
        self.blocks: NDArray[np.intp] = np.concatenate([[0], np.cumsum(sizes, dtype=np.intp)]).astype(np.intp)
        self.window = min(max(memory // max(block_bytes, 1), 2), 256)
        self._decoded: OrderedDict[int, Block] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self.blocks[-1])

    def take(self, rows: NDArray[np.intp]) -> Arrays:
        """The examples of these numbers, in this order."""
        rows = np.asarray(rows, np.intp)
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(self):
            raise DatasetError(f"rows {rows.min()}..{rows.max()} of {len(self)} examples")
        blocks = np.searchsorted(self.blocks, rows, side="right") - 1
        parts = [(np.flatnonzero(blocks == block), int(block)) for block in np.unique(blocks)]
        pieces = [(places, self._block(block), rows[places] - self.blocks[block]) for places, block in parts]
        return {name: _gather(len(rows), name, field, pieces) for name, field in self.fields.items()}

    def locate(self, row: int) -> str:
        """Where an example comes from."""
        return f"row {row}"

    @abstractmethod
    def _read_block(self, block: int) -> Block:
        """Decode a block."""

    def _block(self, block: int) -> Block:
        # One thread decodes at a time: readers of a file are not made for several, and two threads that need the same
        # block would decode it twice.
        with self._lock:
            if block not in self._decoded:
                while len(self._decoded) >= self.window:
                    self._decoded.popitem(last=False)
                self._decoded[block] = self._read_block(block)
            self._decoded.move_to_end(block)
            return self._decoded[block]

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_decoded"] = OrderedDict()
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()


def _gather(
    count: int, name: str, field: Field, pieces: list[tuple[NDArray[np.intp], Block, NDArray[np.intp]]]
) -> NDArray[Any]:
    if any(isinstance(piece[name], Ragged) for _, piece, _ in pieces):
        examples: list[Any] = [None] * count
        for places, piece, rows in pieces:
            for place, example in zip(places, piece[name][rows]):
                examples[place] = example
        return stack(examples, len(field.shape), field.dtype)
    made = np.empty((count, *(size or 0 for size in field.shape)), field.dtype)
    for places, piece, rows in pieces:
        made[places] = piece[name][rows]
    return made
