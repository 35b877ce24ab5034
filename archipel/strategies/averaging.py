"""The server half of federated averaging. Algorithms that differ on the device only share it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from archipel.bundle import Manifest
from archipel.protocol.vector import DecodedSum
from archipel.strategies.device import MakeDevice
from archipel.strategies.strategy import Parameters, StepBound, Strategy, Tensors, mean_norm, server_rate

HYPERPARAMETERS = {"server_lr": 1.0}


def strategy(name: str, device: MakeDevice, *, asynchronous: bool = True, averages: bool = True) -> Strategy:
    """A federated algorithm with this server half and its own device half."""
    return Strategy(
        name=name,
        update=update,
        device=device,
        step_bound=step_bound,
        server_hyperparameters=HYPERPARAMETERS,
        asynchronous=asynchronous,
        averages=averages,
    )


def update(
    parameters: Parameters, state: Tensors, total: DecodedSum, cohort: int, hyperparameters: Mapping[str, float]
) -> tuple[Tensors, Tensors]:
    """The weighted mean of the deltas, times server_lr, added to the parameters."""
    rate = hyperparameters.get("server_lr", 1.0)
    return add_deltas(parameters, total, rate / total.total_weight(cohort)), state


def add_deltas(parameters: Mapping[str, np.ndarray], total: DecodedSum, scale: float) -> Tensors:
    """Each parameter plus `scale` times the sum of its deltas, in the parameter's dtype."""
    # Computed in float64, the type of the sums, and rounded once.
    return {name: (array + scale * total.deltas[name]).astype(array.dtype) for name, array in parameters.items()}


def step_bound(manifest: Manifest, hyperparameters: Mapping[str, float] | None, cohort: int) -> StepBound:
    """The step is server_lr D / W, with D the sum of the deltas and W that of the weights.

    check_sum accepts |D| <= clip (W + k h) + r + n: k devices, h half a step of the weight's encoding, r the rounding
    of the deltas, n the noise. So |D| / W <= clip + (clip k h + r + n) / W, largest for the smallest W, k lowest:

        server_lr (clip (1 + h / lowest) + r / (k lowest) + n / (k lowest))

    r is k half steps times the root of the number of entries, so without noise the bound does not depend on the
    cohort's size. Where all devices weigh 1, W is k and h is 0.
    """
    return StepBound(server_rate(manifest, hyperparameters) * mean_norm(manifest, "delta", cohort))
