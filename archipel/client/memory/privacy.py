"""How much the noise that a device adds protects one of its examples.

Measured in zero-concentrated differential privacy (Bun and Steinke 2016): noise of `multiplier` times what one example
can change costs rho = 1 / (2 multiplier^2), for a discrete Gaussian as for a continuous one (Canonne et al. 2020), and
what is released later adds to it. Two data sets are neighbours here if they differ in one example, which in one of them
counts for nothing (zero-out): it is then in one minibatch of each pass, and a pass releases it once. Nothing is taken
off for the choice of minibatches, which are parts of a permutation and no random samples.

Numbers of examples, and what rounds without noise send, are not covered.
"""

from __future__ import annotations

import math

import numpy as np

from archipel.bundle import Manifest, Phase, Program
from archipel.bundle.roles import Noise as NoisePort
from archipel.client.memory.entry import Noise
from archipel.protocol.messages import Kind
from archipel.protocol.uploads import upload_program

DELTA = 1e-6


def noise_of(manifest: Manifest, kind: Kind, program: str, examples: int) -> tuple[Noise, float]:
    """Whether a round of `kind` over so many examples adds noise, and its rho; 0 where the manifest does not state it.

    `program` is the plan's. Raises ProtocolError where the manifest has no such program.
    """
    last = _multiplier(upload_program(manifest, kind, program))
    steps = manifest.schedule if kind == "training" else ()
    noises = [(_multiplier(manifest.programs[phase.program]), _passes(phase, examples)) for phase in steps]
    if last:
        # Noise on all that is sent covers what was done before.
        return "added", _rho(last)
    if last is None and all(multiplier is None for multiplier, _ in noises):
        return "none", 0.0
    stated = last is None and all(multiplier for multiplier, _ in noises)
    return "added", sum(passes * _rho(multiplier) for multiplier, passes in noises if multiplier) if stated else 0.0


def epsilon(rho: float, delta: float = DELTA) -> float:
    """An epsilon for which rho-zCDP is (epsilon, delta)-differentially private: the least over Renyi orders of
    Canonne, Kamath and Steinke 2020, proposition 12. Every order gives a bound."""
    if not rho:
        return 0.0
    above = np.logspace(-3, 6, 4001)  # of the order, over 1
    bounds = rho * (1 + above) + (-math.log(delta) - np.log1p(above)) / above + np.log(above / (1 + above))
    return max(0.0, float(bounds.min()))


def _rho(multiplier: float) -> float:
    return 1 / (2.0 * multiplier**2)


def _multiplier(program: Program) -> float | None:
    """None where it draws no noise, 0 where it is not stated for all of it."""
    return min((port.multiplier for port in program.inputs if isinstance(port, NoisePort)), default=None)


def _passes(phase: Phase, examples: int) -> int:
    """In how many minibatches of the phase one example is at most."""
    if phase.epochs is not None:
        return phase.epochs
    return math.ceil((phase.steps or 0) / max(1, examples // phase.batch_size))
