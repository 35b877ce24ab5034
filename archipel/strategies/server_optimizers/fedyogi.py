"""FedYogi (Reddi et al. 2021, "Adaptive federated optimization", algorithm 2): Yogi on the server.

Device half: that of federated averaging.
Server half: with d the weighted mean of the deltas, m = beta1 m + (1 - beta1) d,
v = v - (1 - beta2) d^2 sign(v - d^2), parameters + server_lr * m / (sqrt(v) + tau), see
strategies.server_optimizers.adaptive. Unlike Adam's, v falls slowly after a few large deltas.
"""

from __future__ import annotations

import math

import numpy as np

from archipel.strategies.device import DeviceHalf, Upload
from archipel.strategies.finish import weighted_deltas
from archipel.strategies.server_optimizers import adaptive
from archipel.strategies.server_optimizers.adaptive import Values


def _follow(v: Values, squares: Values, beta2: float) -> Values:
    moved: Values = v - (1 - beta2) * squares * np.sign(v - squares)
    return moved


def _ratio(beta1: float, beta2: float) -> float:
    """With r = |m| / sqrt(v) before a step and d = sqrt(a v). Where v grows (a > 1), as for Adam:
    r'^2 <= beta1^2 r^2 + (1 - beta1)^2 / (1 - beta2), with the limit `growing`. Where it falls (a <= 1),
    r' <= (beta1 r + 1 - beta1) / sqrt(beta2), which is at most r from `falling` on. So r stays below the larger one.
    """
    growing = (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2))
    if math.sqrt(beta2) <= beta1:
        return math.inf
    return max(growing, (1 - beta1) / (math.sqrt(beta2) - beta1))


def device(upload: Upload) -> DeviceHalf:
    """One phase over all parameters."""
    return DeviceHalf(finish=weighted_deltas(upload))


STRATEGY = adaptive.strategy(
    "fedyogi", device, adaptive.Rule(follow=_follow, ratio=_ratio, share=lambda beta2: 1 - beta2)
)
