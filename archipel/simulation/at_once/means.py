"""Metrics of many devices over the steps of a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass
class Mean:
    """A metric of each lane: reduced as its port says."""

    reduction: str
    total: NDArray[np.float64]
    weight: NDArray[np.float64]

    def add(self, lanes: NDArray[np.int64], values: NDArray[Any], weight: float) -> None:
        if self.reduction == "last":
            self.total[lanes], self.weight[lanes] = values, 1.0
        else:
            factor = weight if self.reduction == "mean" else 1.0
            self.total[lanes] += values.astype(np.float64) * factor
            self.weight[lanes] += weight

    def reduced(self) -> NDArray[np.float64]:
        """The metric of each lane; NaN where it has no weight."""
        if self.reduction != "mean":
            return self.total
        return np.divide(self.total, self.weight, out=np.full_like(self.total, np.nan), where=self.weight > 0)
