"""The server's own examples in a federation's file, for the rule that compares updates with one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from archipel import datasets
from archipel.datasets import open_file
from archipel.errors import SimulationError
from archipel.simulation.federation_parts.data import Arrays, DataSource, Examples, arrays_of


class RootSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[root]: one of `share`, of the training data; `rows`, these of the training data, from 0 on; and `data`, a file
    like `data.train`, read with the options of these. No device has what is taken of the training data."""

    share: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None
    rows: tuple[Annotated[int, msgspec.Meta(ge=0, le=1 << 53)], ...] | None = None
    data: str | None = None

    def check(self, data: DataSource) -> None:
        """Raises SimulationError that names the key, before anything is read."""
        given = [name for name in self.__struct_fields__ if getattr(self, name) is not None]
        if len(given) != 1:
            raise SimulationError(f"root: give one of share, rows and data, got {given or 'none'}")
        if self.rows is not None:
            if not self.rows or len(set(self.rows)) < len(self.rows):
                raise SimulationError("root.rows: expected one row or more, each once")
            if data.hold_out is not None:
                raise SimulationError(
                    "root.rows: data.hold_out takes rows of the training data as well; give test data as a file, or "
                    "root.share"
                )


def take_root(
    source: RootSource, examples: Examples, data: DataSource, folder: Path, seed: int
) -> tuple[Arrays, Examples]:
    """The server's own examples, with the names that they have in files, and what is left for the devices.

    Raises DatasetError, SimulationError that names the key.
    """
    if source.data is not None:
        return arrays_of("root.data", open_file(folder / source.data, **data.options)), examples
    train = examples.train
    if not isinstance(train, dict):
        key = "share" if source.share is not None else "rows"
        raise SimulationError(f"root.{key}: the data are divided over devices already; give root.data, a file")
    if source.share is not None:
        rest, held = datasets.hold_out(train, source.share, seed=seed)
        return arrays_of("root.share", held), _left(examples, arrays_of("data.train", rest), rest.rows)
    count, rows = len(next(iter(train.values()))), np.array(source.rows, np.int64)
    if rows.max() >= count:
        raise SimulationError(f"root.rows: no row {rows.max()}; the training data have 0 to {count - 1}")
    if len(rows) == count:
        raise SimulationError(f"root.rows: has all {count} rows of the training data; leave some to the devices")
    left: dict[str, Any] = {name: np.delete(array, rows, axis=0) for name, array in train.items()}
    kept = np.delete(np.arange(count), rows)
    return {name: array[rows] for name, array in train.items()}, _left(examples, left, kept)


def _left(examples: Examples, train: Arrays, kept: NDArray[Any]) -> Examples:
    rows = kept if examples.rows is None else examples.rows[kept]
    return msgspec.structs.replace(examples, train=train, rows=rows)
