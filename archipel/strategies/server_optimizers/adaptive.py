"""The server half of the adaptive algorithms (Reddi et al. 2021, "Adaptive federated optimization", algorithm 2).

The weighted mean of the deltas takes the place of a gradient. For each parameter, with the delta d:

    m = beta1 m + (1 - beta1) d             begins at 0
    v = what the algorithm's rule makes of v and d^2, begins at tau^2
    parameter + server_lr * m / (sqrt(v) + tau)

As in the paper, neither m nor v is corrected for how it begins. The state has v - tau^2, which begins at 0 whatever tau
is. A step is as long as server_lr says, hardly as the deltas are: |m| / sqrt(v) is about 1 in each element while the
deltas agree. tau says which deltas are small: of those, a parameter follows server_lr / tau times the mean delta.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from archipel.bundle import Manifest
from archipel.protocol.vector import DecodedSum
from archipel.strategies.device import MakeDevice
from archipel.strategies.strategy import (
    Parameters,
    StepBound,
    Strategy,
    Tensors,
    changed_elements,
    mean_norm,
    server_rate,
    server_value,
)

MOMENTUM, SECOND_MOMENT = "momentum/", "second_moment/"
"""Prefixes of the names of m and of v - tau^2 in the server's state."""
RATE, TAU = 0.01, 1e-3
"""Defaults of server_lr and tau."""
_TAU = (1e-8, 1.0)
"""The smallest and largest tau. Without a smallest one, a step could have any length at rates between the rules' own
(see `Rule.ratio`)."""
_LARGEST_BETA = 0.9999

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Rule:
    """How v follows the squares of the deltas.

    `follow`: v, d^2, beta2 -> the next v, 0 or more. `ratio`: beta1, beta2 -> the largest |m| / sqrt(v - floor) that
    any sequence of deltas reaches, infinite where there is none. `grows`: v never falls below tau^2, which is then the
    floor; else the floor is 0. `share`: beta2 -> the factor of d^2 in the change of v. `decays`: whether the same
    factor takes off from v.
    """

    follow: Callable[[Values, Values, float], Values]
    ratio: Callable[[float, float], float]
    share: Callable[[float], float]
    grows: bool = False
    decays: bool = False


def strategy(name: str, device: MakeDevice, rule: Rule, *, beta1: float = 0.9, beta2: float | None = 0.99) -> Strategy:
    """An algorithm with this server half. `beta2` None: its rule has none."""
    betas = {"beta1": beta1} if beta2 is None else {"beta1": beta1, "beta2": beta2}
    defaults = {"server_lr": RATE, "tau": TAU, **betas}

    def update(
        parameters: Parameters, state: Tensors, total: DecodedSum, cohort: int, hyperparameters: Mapping[str, float]
    ) -> tuple[Tensors, Tensors]:
        given = {key: hyperparameters.get(key, value) for key, value in defaults.items()}
        return _moved(rule, parameters, state, total, total.total_weight(cohort), given)

    def step_bound(manifest: Manifest, hyperparameters: Mapping[str, float] | None, cohort: int) -> StepBound:
        mean = mean_norm(manifest, "delta", cohort)
        size = changed_elements(manifest)
        rate = server_rate(manifest, hyperparameters, RATE)
        if hyperparameters is None:
            # Who is not told the others reckons with the worst of each.
            state = _state_bound(rule, mean, size, 0.0, 0.0, _TAU[1])
            return StepBound(rate * mean / _TAU[0], state)
        tau = server_value(hyperparameters, "tau", TAU, *_TAU)
        own = {key: server_value(hyperparameters, key, value, 0.0, _LARGEST_BETA) for key, value in betas.items()}
        one, two = own["beta1"], own.get("beta2", 0.0)
        reach = largest_step(mean, size, rule.ratio(one, two), tau, tau**2 if rule.grows else 0.0)
        return StepBound(rate * reach, _state_bound(rule, mean, size, one, two, tau))

    return Strategy(
        name=name,
        init=init,
        update=update,
        device=device,
        step_bound=step_bound,
        server_hyperparameters=defaults,
        asynchronous=True,
    )


def init(parameters: Mapping[str, np.ndarray]) -> Tensors:
    """m and v - tau^2, which begin at 0."""
    return {
        prefix + name: np.zeros_like(array)
        for prefix in (MOMENTUM, SECOND_MOMENT)
        for name, array in parameters.items()
    }


def largest_step(norm: float, size: int, ratio: float, tau: float, floor: float) -> float:
    """The largest L2 norm of m / (sqrt(v) + tau) where |m| <= `norm` and |m_i| <= ratio sqrt(v_i - floor).

    With s = m_i^2 an element of it is at most sqrt(g(s)), g(s) = s / (sqrt(s / ratio^2 + floor) + tau)^2. g is concave:
    for floor 0 its derivative is tau / (sqrt(s) / ratio + tau)^3, which falls; for floor tau^2 it is
    ratio^2 (1 - 2 tau / (u + tau)) with u = sqrt(s / ratio^2 + tau^2), a rising concave function of a concave one. So
    the sum over `size` elements, whose s add up to norm^2 at most, is largest where all are alike (Jensen).
    """
    each = norm / math.sqrt(size)
    return norm / (math.sqrt((each / ratio) ** 2 + floor) + tau)


def _state_bound(rule: Rule, mean: float, size: int, beta1: float, beta2: float, tau: float) -> float:
    """m changes by (1 - beta1) (d - m), and |m| <= D as |d| <= D. v changes by `share` d^2, |d^2| <= D^2.

    Where v decays, by share (d^2 - v): neither has an element below 0, so the norm is at most that of both as sides of
    a right angle; v is a mean of tau^2 and of squares.
    """
    moment = 2 * (1 - beta1) * mean
    other = max(mean**2, tau**2 * math.sqrt(size)) if rule.decays else 0.0
    return math.hypot(moment, rule.share(beta2) * math.hypot(mean**2, other))


def _moved(
    rule: Rule,
    parameters: Mapping[str, np.ndarray],
    state: Tensors,
    total: DecodedSum,
    weight: float,
    given: Mapping[str, float],
) -> tuple[Tensors, Tensors]:
    rate, tau, beta1, beta2 = given["server_lr"], given["tau"], given["beta1"], given.get("beta2", 0.0)
    moved, first, second = {}, {}, {}
    for name, array in parameters.items():
        # In float64, the type of the sums; each result is rounded once.
        delta = total.deltas[name] / weight
        m = beta1 * state[MOMENTUM + name].astype(np.float64) + (1 - beta1) * delta
        # Storing v - tau^2 may have rounded it to a little less than -tau^2.
        v = np.maximum(state[SECOND_MOMENT + name].astype(np.float64) + tau**2, 0.0)
        v = rule.follow(v, delta * delta, beta2)
        moved[name] = (array + rate * m / (np.sqrt(v) + tau)).astype(array.dtype)
        first[MOMENTUM + name] = m.astype(array.dtype)
        second[SECOND_MOMENT + name] = (v - tau**2).astype(array.dtype)
    return moved, {**first, **second}
