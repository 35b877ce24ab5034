"""FedAdam (Reddi et al. 2021, "Adaptive federated optimization", algorithm 2): Adam on the server.

Device half: that of federated averaging.
Server half: with d the weighted mean of the deltas, m = beta1 m + (1 - beta1) d, v = beta2 v + (1 - beta2) d^2,
parameters + server_lr * m / (sqrt(v) + tau), see strategies.server_optimizers.adaptive.
"""

from __future__ import annotations

import math

from archipel.strategies.device import DeviceHalf, Upload
from archipel.strategies.finish import weighted_deltas
from archipel.strategies.server_optimizers import adaptive
from archipel.strategies.server_optimizers.adaptive import Values


def _follow(v: Values, squares: Values, beta2: float) -> Values:
    return beta2 * v + (1 - beta2) * squares


def _ratio(beta1: float, beta2: float) -> float:
    """With r = |m| / sqrt(v) before a step and d = sqrt(a v): r' <= (beta1 r + (1 - beta1) sqrt(a)) / sqrt(beta2 +
    (1 - beta2) a), so by Cauchy and Schwarz r'^2 <= beta1^2 / beta2 r^2 + (1 - beta1)^2 / (1 - beta2), with this limit.
    """
    if beta1 == 0:
        return 1 / math.sqrt(1 - beta2)
    if beta1**2 >= beta2:
        return math.inf
    return (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2))


def device(upload: Upload) -> DeviceHalf:
    """One phase over all parameters."""
    return DeviceHalf(finish=weighted_deltas(upload))


STRATEGY = adaptive.strategy(
    "fedadam", device, adaptive.Rule(follow=_follow, ratio=_ratio, share=lambda beta2: 1 - beta2, decays=True)
)
