"""The server half of federated averaging, which the algorithms that differ on the device alone share."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from archipel.protocol.vector import DecodedSum
from archipel.strategies.strategy import Tensors

HYPERPARAMETERS = {"server_lr": 1.0}


def update(
    parameters: Mapping[str, np.ndarray],
    state: Tensors,
    total: DecodedSum,
    cohort: int,
    hyperparameters: Mapping[str, float],
) -> tuple[Tensors, Tensors]:
    """The weighted mean of the deltas, times server_lr, added to the parameters.

    Without a weight entry every device weighs 1.
    """
    weight = float(cohort) if total.weight is None else total.weight
    if weight <= 0:
        # Every survivor had no examples: there is nothing to average, and nothing to divide by.
        return dict(parameters), state
    return add(parameters, total, hyperparameters.get("server_lr", 1.0) / weight), state


def add(parameters: Mapping[str, np.ndarray], total: DecodedSum, scale: float) -> Tensors:
    """Each parameter plus `scale` times the sum of its deltas, in its own type."""
    return {name: (array + scale * total.deltas[name]).astype(array.dtype) for name, array in parameters.items()}
