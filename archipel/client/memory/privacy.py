"""How much the noise that a device adds protects one of its examples.

The measure is zero-concentrated differential privacy (Bun and Steinke 2016): noise of `multiplier` times what one
example can change costs rho = 1 / (2 multiplier^2), for a discrete Gaussian as for a continuous one (Canonne et al.
2020), and the rhos of several releases add up. Two data sets are neighbours here if they differ in one example, which
counts for nothing in one of them (zero-out): the example is in one minibatch of each pass, and a pass releases it once.
There is no amplification by sampling, because the minibatches are parts of a permutation and no random samples.

Noise that devices add to their updates for a round's sum (protocol.noised) counts as well.

It does not cover how many examples there are, nor what rounds without noise send.
"""

from __future__ import annotations

import math

import numpy as np

from archipel.bundle import Manifest, Phase, Program
from archipel.bundle.roles import Noise as NoisePort
from archipel.client.memory.entry import Noise
from archipel.protocol.messages import Kind, RoundPlan
from archipel.protocol.noised.shares import noise_multiplier
from archipel.protocol.policy import noisy_devices
from archipel.protocol.uploads import plan_layout, upload_program

DELTA = 1e-6


def noise_of(manifest: Manifest, kind: Kind, program: str, examples: int) -> tuple[Noise, float]:
    """Whether a round of `kind` over `examples` adds noise, and its rho; 0 if the manifest does not state it.

    `program` is the plan's. Raises ProtocolError if the manifest has no such program.
    """
    last = _multiplier(upload_program(manifest, kind, program))
    steps = manifest.schedule if kind == "training" else ()
    noises = [(_multiplier(manifest.programs[phase.program]), _passes(phase, examples)) for phase in steps]
    if last:
        # Noise on everything that is sent also covers the training steps before it (post-processing).
        return "added", _rho(last)
    if last is None and all(multiplier is None for multiplier, _ in noises):
        return "none", 0.0
    # One phase without noise, or without a stated multiplier, leaves the whole round without a bound.
    stated = last is None and all(multiplier for multiplier, _ in noises)
    return "added", sum(passes * _rho(multiplier) for multiplier, passes in noises if multiplier) if stated else 0.0


def noise_in_round(plan: RoundPlan, manifest: Manifest, examples: int) -> tuple[Noise, float]:
    """The same of a round with this plan, with the noise that its devices add to their updates.

    That one counts as far as the policy says how many devices may work with the server. Raises ProtocolError, and
    PolicyError for noise that cannot cover what the device sends.
    """
    noise, rho = noise_of(manifest, plan.kind, plan.program, examples)
    if plan.noise is None:
        return noise, rho
    devices = noisy_devices(plan, manifest.privacy)
    multiplier = noise_multiplier(plan.noise, plan_layout(plan, manifest).length, devices)
    # The multiplier is that of all of the device's changes against none. One example makes other changes of them, which
    # differ by twice as much at most.
    own = _rho(multiplier / 2)
    return "added", min(rho, own) if rho else own


def epsilon(rho: float, delta: float = DELTA) -> float:
    """An epsilon for which rho-zCDP implies (epsilon, delta)-differential privacy.

    It is the least bound over Renyi orders by proposition 12 of Canonne, Kamath and Steinke 2020. Every order gives a
    valid bound, so the grid of orders costs tightness only.
    """
    if not rho:
        return 0.0
    above = np.logspace(-3, 6, 4001)  # the order less 1
    bounds = rho * (1 + above) + (-math.log(delta) - np.log1p(above)) / above + np.log(above / (1 + above))
    return max(0.0, float(bounds.min()))


def noise_for(target: float, passes: int, delta: float = DELTA) -> float:
    """The least noise multiplier, up to 1 in 10^6, with which `passes` over an example cost at most `target` epsilon.

    Training for E epochs in each of R rounds makes E R passes. Raises ValueError for numbers that are not above 0.
    """
    if not (0 < target < math.inf and passes > 0):
        raise ValueError(f"expected an epsilon and a number of passes above 0, got {target} and {passes}")
    low, high = 0.0, 1.0
    while epsilon(passes * _rho(high), delta) > target:
        low, high = high, 2 * high
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if epsilon(passes * _rho(middle), delta) <= target else (middle, high)
    return high


def _rho(multiplier: float) -> float:
    return 1 / (2.0 * multiplier**2)


def _multiplier(program: Program) -> float | None:
    """The least multiplier of the program's noise inputs: None without any, 0 if one of them does not state it."""
    return min((port.multiplier for port in program.inputs if isinstance(port, NoisePort)), default=None)


def _passes(phase: Phase, examples: int) -> int:
    """The most minibatches of the phase that contain any one example."""
    if phase.epochs is not None:
        return phase.epochs
    # A begun pass counts as a whole one. To round down the batches of a pass can only raise the number of passes.
    return math.ceil((phase.steps or 0) / max(1, examples // phase.batch_size))
