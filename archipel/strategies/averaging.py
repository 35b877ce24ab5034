"""The server half of federated averaging. Algorithms that differ on the device only share it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from archipel.bundle import Manifest
from archipel.protocol.bounds import entries
from archipel.protocol.vector import DecodedSum
from archipel.strategies.device import MakeDevice
from archipel.strategies.strategy import (
    Parameters,
    StepBound,
    Strategy,
    Tensors,
    mean_norm,
    server_rate,
    training_layout,
)

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


def add_slices(parameters: Parameters, total: DecodedSum, weights: np.ndarray, rate: float) -> Tensors:
    """Each slice along the first axis plus `rate` times the mean of its own deltas, whose weights add up to `weights`.

    A slice whose weight is 0 stays. `weights` are [n], the first axis of all parameters.
    """
    chosen = weights > 0
    rates = np.where(chosen, rate / np.where(chosen, weights, 1.0), 0.0)
    return {
        name: (array + rates.reshape(-1, *[1] * (array.ndim - 1)) * total.deltas[name]).astype(array.dtype)
        for name, array in parameters.items()
    }


def slices_bound(manifest: Manifest, hyperparameters: Mapping[str, float] | None, cohort: int, entry: str) -> StepBound:
    """Of `add_slices`, where the update's entry `entry` has the weights, and a device's delta keeps to the clip.

    The mean of each slice has the bound D of federated averaging, because the devices that share in it are a cohort by
    themselves. Of n slices the squares add up to n D^2 at most, and to k D^2, as the slices of one device's delta add
    up to its clip: so all together move by server_lr D times the root of the smaller of n and k.

    check_sum knows no sum of one slice alone, so a sum that no honest devices can have sent may pass it and break this
    bound; its round is rejected.
    """
    count = next(entries(port) for port in training_layout(manifest).updates if port.tensor == entry)
    moving = math.sqrt(min(count, cohort))
    return StepBound(server_rate(manifest, hyperparameters) * moving * mean_norm(manifest, "delta", cohort))


def step_bound(manifest: Manifest, hyperparameters: Mapping[str, float] | None, cohort: int) -> StepBound:
    """The step is server_lr D / W, with D the sum of the deltas and W that of the weights.

    check_sum accepts |D| <= clip (W + k h) + r + n: k devices, h half a step of the weight's encoding, r the rounding
    of the deltas, n the noise. So |D| / W <= clip + (clip k h + r + n) / W, largest for the smallest W, k lowest:

        server_lr (clip (1 + h / lowest) + r / (k lowest) + n / (k lowest))

    r is k half steps times the root of the number of entries, so without noise the bound does not depend on the
    cohort's size. Where all devices weigh 1, W is k and h is 0.
    """
    return StepBound(server_rate(manifest, hyperparameters) * mean_norm(manifest, "delta", cohort))
