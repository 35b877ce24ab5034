"""FedAsync (Xie et al. 2019, "Asynchronous federated optimization", algorithm 1): each update is mixed in by itself.

Device half: that of FedProx: every step adds mu (w - the model as received) to the gradient.
Server half: with w the present model, w_k the one that a device made of a version that is s versions old, the next is

    (1 - a) w + a w_k        where a = server_lr * (1 + s)^-staleness_exponent * hinge(s)

The paper's three discounts are a constant (staleness_exponent 0), a polynomial one (the exponent is the task's) and
hinge(s): 1 up to `hinge_delay`, 1 / (hinge_slope (s - hinge_delay) + 1) beyond (staleness_exponent 0).

FedBuff with a buffer of one, which is what any strategy does in an asynchronous plain task with a cohort of 1, adds a
times the device's change. FedAsync goes a times the way to the device's model, and so also back by a times what others
changed meanwhile. For that the server needs the version that the device began with, and each update by itself: so it
takes asynchronous plain tasks with a cohort of 1. A secure sum has two devices or more.

What the others changed counts as at most MEMORY times the largest update, so that a bound exists; the paper has none.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from archipel.bundle import Manifest
from archipel.errors import ConversionError
from archipel.protocol.bounds import joint_norm
from archipel.protocol.vector import DecodedSum
from archipel.strategies import averaging
from archipel.strategies.device import DeviceHalf, Part, Pull, Upload, check_not_negative
from archipel.strategies.finish import weighted_deltas
from archipel.strategies.strategy import (
    Began,
    Parameters,
    StepBound,
    Strategy,
    Tensors,
    mean_norm,
    server_rate,
    server_value,
)

ALPHA = 0.6
"""The default of server_lr: the smaller alpha of the paper's experiments with CIFAR-10, where the other one is 0.9."""
MEMORY = 10.0
"""The versions between count as at most so many times the largest update."""
_DEFAULTS = {"hinge_slope": 0.0, "hinge_delay": 4.0}
_LARGEST = 1e6


def mix(
    parameters: Parameters, total: DecodedSum, began: Began, manifest: Manifest, hyperparameters: Mapping[str, float]
) -> DecodedSum:
    """The change from the present model to the device's, in place of that from the model with which it began."""
    weight = total.total_weight(1)
    kept = _hinge(began.staleness, hyperparameters)
    back = {name: np.subtract(began.parameters[name], array, dtype=np.float64) for name, array in parameters.items()}
    far = joint_norm(back.values())
    shorter = min(1.0, MEMORY * mean_norm(manifest, "delta", 1) / far) if far > 0 else 1.0
    # The sum is weighted and discounted already.
    scale = weight * began.discount * shorter
    deltas = {name: kept * (delta + scale * back[name]) for name, delta in total.deltas.items()}
    # Running statistics are mixed by the same share; no rate of the server scales them elsewhere.
    share = kept * min(1.0, hyperparameters.get("server_lr", ALPHA))
    moments = {name: share * moment for name, moment in total.moments.items()}
    return DecodedSum(deltas, total.values, total.weight, moments)


def update(
    parameters: Parameters, state: Tensors, total: DecodedSum, cohort: int, hyperparameters: Mapping[str, float]
) -> tuple[Tensors, Tensors]:
    """parameters + server_lr * the change that `mix` made."""
    return averaging.update(parameters, state, total, cohort, {"server_lr": ALPHA, **hyperparameters})


def step_bound(manifest: Manifest, hyperparameters: Mapping[str, float] | None, cohort: int) -> StepBound:
    """server_lr (1 + MEMORY) D: a change of norm D, and the way back, which is at most MEMORY D. Discounts shorten."""
    if hyperparameters is not None:
        _hinge(0, hyperparameters)
    rate = server_rate(manifest, hyperparameters, ALPHA)
    return StepBound(rate * (1 + MEMORY) * mean_norm(manifest, "delta", cohort))


def device(upload: Upload, *, mu: float = 0.005) -> DeviceHalf:
    """`mu` is the default of the hyperparameter mu, the paper's rho, which is 0.005 in experiments with CIFAR-10."""
    if upload.compress is not None:
        raise ConversionError(
            f"strategy {upload.strategy!r}: compress is for rounds whose devices begin together; leave it out"
        )
    pull = Pull("mu", check_not_negative(upload.strategy, "mu", mu))
    return DeviceHalf(finish=weighted_deltas(upload), parts=(Part(terms=(pull,)),))


def _hinge(staleness: int, hyperparameters: Mapping[str, float]) -> float:
    """Raises PolicyError for a slope or a delay beyond their bounds."""
    slope, delay = (server_value(hyperparameters, name, default, 0.0, _LARGEST) for name, default in _DEFAULTS.items())
    return 1.0 / (slope * max(staleness - delay, 0.0) + 1.0)


STRATEGY = Strategy(
    name="fedasync",
    update=update,
    device=device,
    step_bound=step_bound,
    server_hyperparameters={"server_lr": ALPHA, **_DEFAULTS},
    asynchronous=True,
    mix=mix,
)
