"""FedAdagrad (Reddi et al. 2021, "Adaptive federated optimization", algorithm 2): Adagrad on the server.

Device half: that of federated averaging.
Server half: with d the weighted mean of the deltas, m = beta1 m + (1 - beta1) d (beta1 is 0 by default, as in the
paper's experiments), v = v + d^2, parameters + server_lr * m / (sqrt(v) + tau), see
strategies.server_optimizers.adaptive. v only grows, so steps become shorter from round to round.
"""

from __future__ import annotations

import math

from archipel.strategies.device import DeviceHalf, Upload
from archipel.strategies.finish import weighted_deltas
from archipel.strategies.server_optimizers import adaptive
from archipel.strategies.server_optimizers.adaptive import Values


def _follow(v: Values, squares: Values, beta2: float) -> Values:
    return v + squares


def _ratio(beta1: float, beta2: float) -> float:
    """|m| / sqrt(v - tau^2): m is a sum of d with the factors (1 - beta1) beta1^k, v - tau^2 the sum of d^2. By Cauchy
    and Schwarz their quotient is at most the norm of these factors, sqrt((1 - beta1) / (1 + beta1)).
    """
    return math.sqrt((1 - beta1) / (1 + beta1))


def device(upload: Upload) -> DeviceHalf:
    """One phase over all parameters."""
    return DeviceHalf(finish=weighted_deltas(upload))


STRATEGY = adaptive.strategy(
    "fedadagrad",
    device,
    adaptive.Rule(follow=_follow, ratio=_ratio, share=lambda beta2: 1.0, grows=True),
    beta1=0.0,
    beta2=None,
)
