"""FedAvgM (Hsu et al. 2019, "Measuring the effects of non-identical data distribution", section 4): server momentum.

Device half: that of federated averaging.
Server half: m = beta m + weighted mean of the deltas, which begins at 0; parameters + server_lr * m.

So a change counts in later rounds, too, server_lr / (1 - beta) times in all: with beta = 0.9 ten times.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from archipel.bundle import Manifest
from archipel.protocol.vector import DecodedSum
from archipel.strategies import averaging
from archipel.strategies.device import DeviceHalf, Upload
from archipel.strategies.finish import weighted_deltas
from archipel.strategies.strategy import Parameters, StepBound, Strategy, Tensors, mean_norm, server_rate, server_value

MOMENTUM = "momentum/"
"""Prefix of the names of m in the server's state."""
_BETA = 0.9
_LARGEST = 0.99
"""With a larger beta a single round could count more than a hundred times, and no bound would be of use."""


def init(parameters: Mapping[str, np.ndarray]) -> Tensors:
    """m, which begins at 0."""
    return {MOMENTUM + name: np.zeros_like(array) for name, array in parameters.items()}


def update(
    parameters: Parameters, state: Tensors, total: DecodedSum, cohort: int, hyperparameters: Mapping[str, float]
) -> tuple[Tensors, Tensors]:
    """The server half."""
    weight = total.total_weight(cohort)
    rate, beta = hyperparameters.get("server_lr", 1.0), hyperparameters.get("beta", _BETA)
    moved, following = {}, {}
    for name, array in parameters.items():
        # In float64, the type of the sums; each result is rounded once.
        momentum = beta * state[MOMENTUM + name].astype(np.float64) + total.deltas[name] / weight
        moved[name] = (array + rate * momentum).astype(array.dtype)
        following[MOMENTUM + name] = momentum.astype(array.dtype)
    return moved, following


def step_bound(manifest: Manifest, hyperparameters: Mapping[str, float] | None, cohort: int) -> StepBound:
    """With D the bound of a mean delta, |m| <= D (1 + beta + beta^2 + ...) = D / (1 - beta).

    m changes by delta - (1 - beta) m, whose norm is at most D + D. A step that was scaled down leaves m between two
    values that keep to the bound, so within it.
    """
    mean = mean_norm(manifest, "delta", cohort)
    # Who is not told beta reckons with the largest.
    beta = _LARGEST if hyperparameters is None else server_value(hyperparameters, "beta", _BETA, 0.0, _LARGEST)
    return StepBound(server_rate(manifest, hyperparameters) * mean / (1 - beta), 2 * mean)


def device(upload: Upload) -> DeviceHalf:
    """One phase over all parameters."""
    return DeviceHalf(finish=weighted_deltas(upload))


STRATEGY = Strategy(
    name="fedavgm",
    init=init,
    update=update,
    device=device,
    step_bound=step_bound,
    server_hyperparameters={**averaging.HYPERPARAMETERS, "beta": _BETA},
    asynchronous=True,
)
