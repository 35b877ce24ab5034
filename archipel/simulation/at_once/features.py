"""What a frozen backbone makes of the examples of many devices: computed once for each, as the runtime keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipel.bundle import Bundle
from archipel.lite_runtime.engines.sessions import Sessions
from archipel.lite_runtime.fields import Fields
from archipel.lite_runtime.training.features import FeatureCache


class LaneFeatures:
    """The features of the examples in some arrays, for batches of several devices.

    They are those of a FeatureCache: rows beyond `budget` bytes lie sealed in a file. A batch runs the backbone for the
    examples that no batch has had, for each device by itself; so it runs as on that device.

    Arguments:
        bundle: with the program `name`, of kind "features".
        sessions: open it.
        arrays: `[examples, ...]` by field name.
        budget: bytes in memory.
    """

    def __init__(
        self,
        bundle: Bundle,
        name: str,
        sessions: Sessions,
        arrays: Mapping[str, NDArray[Any]],
        budget: int,
    ) -> None:
        own = {port.name: arrays[port.name] for port in bundle.program(name).inputs}
        fields = Fields(own, len(next(iter(own.values()))))
        self._cache = FeatureCache(sessions, bundle, name, fields, keep=True, budget=budget)
        self._sources = {name: source for name, source in fields.sources.items() if name not in own}
        self._types = {port.name: port.dtype for port in bundle.program(name).outputs}

    def take(self, rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Every feature by name, `[lanes, batch, ...]`, of the examples `rows`, `[lanes, batch]`."""
        taken = {
            name: np.empty((*rows.shape, *source.shape[1:]), self._types[name])
            for name, source in self._sources.items()
        }
        for lane, indices in enumerate(rows):
            for name, source in self._sources.items():
                source.take(indices, taken[name][lane])
        return taken

    def close(self) -> None:
        """Forget them."""
        self._cache.close()
