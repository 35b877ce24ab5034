"""How much noise the shares of a round's devices make together, and how much one device needs to add.

Each device adds discrete Gaussian noise of standard deviation s to every entry of its vector of whole numbers, whose L2
norm is at most D. The sum over a round then has the noise of all its devices. Of these some may work with the server
and take theirs out again; h are left. Sums of discrete Gaussians are not quite discrete Gaussian. Kairouz, Liu and
Steinke 2021 ("The distributed discrete Gaussian mechanism for federated learning with secure aggregation", theorem 1
for the sum of d entries) show that it is (e^2 / 2)-concentrated differentially private with

    e = D / (sqrt(h) s) + t sqrt(d),        t = 10 (exp(-2 pi^2 s^2 1/2) + ... + exp(-2 pi^2 s^2 (h-1)/h))

which is what continuous Gaussian noise of 1 / e times D costs. From s = LEAST_DEVIATION on t is below 10^-64, so in
floating point nothing of it is left. (Skellam noise, the other choice, is closed under sums, and pays for it by a term
with the L1 norm: Agarwal, Kairouz and Liu 2021, theorem 3.5. It would need another event in the account and another
exact sampler, and gain where s is below 2 steps, which `choose_share` never chooses.)

Neighbours are a round with a device's changes, and the same round with zeros in their place, noise included: so the
device's own share counts among the h.
"""

from __future__ import annotations

import math

from archipel.errors import PolicyError
from archipel.protocol.messages import NoiseShare
from archipel.protocol.messages.rounds import MOST_NOISE

LEAST_DEVIATION = 4
"""In steps."""
_FEWEST_STEPS = 256
_FINE = 4
"""Steps of the clip, in roots of the number of entries: then rounding adds less than 2% to the noise."""


def squared_norm(steps: int, length: int) -> int:
    """D^2: the most that the squares of a device's `length` whole numbers add up to, of a clip of so many steps.

    A vector of norm c, each element rounded up or down by chance, has a squared norm of at most this with a probability
    of 1 - exp(-1/2) or more (Kairouz, Liu and Steinke 2021, equation 2 with granularity 1): c^2 + d / 4 + c +
    sqrt(d) / 2. Devices round until it holds.
    """
    # In whole numbers and rounded down, so that all compute the same.
    return steps * steps + length // 4 + steps + math.isqrt(length) // 2


def noise_multiplier(share: NoiseShare, length: int, devices: int) -> float:
    """The noise of so many devices' shares, over the most by which one device can change the sum of `length` entries.

    As of continuous Gaussian noise that costs the same.
    """
    norm = math.sqrt(squared_norm(share.steps, length))
    ratios = (k / (k + 1) for k in range(1, devices))
    apart = 10 * math.fsum(math.exp(-2 * (math.pi * share.deviation) ** 2 * ratio) for ratio in ratios)
    return 1 / (norm / (math.sqrt(devices) * share.deviation) + apart * math.sqrt(length))


def choose_share(multiplier: float, length: int, devices: int) -> NoiseShare:
    """What each device adds, so that `devices` of them make at least this noise multiplier.

    Raises PolicyError for more noise than whole numbers of 32 bits hold.
    """
    few = math.ceil(LEAST_DEVIATION * math.sqrt(devices) / multiplier)
    steps = max(math.ceil(_FINE * math.sqrt(length)), few, _FEWEST_STEPS)
    wanted = multiplier * math.sqrt(squared_norm(steps, length) / devices) if steps <= MOST_NOISE else math.inf
    if wanted > MOST_NOISE:
        raise PolicyError(
            f"noise_multiplier: {multiplier:g} for {length} entries and {devices} devices takes noise or steps beyond "
            f"{MOST_NOISE}, which whole numbers of 32 bits do not hold; take a multiplier nearer to 1"
        )
    share = NoiseShare(deviation=max(math.ceil(wanted), LEAST_DEVIATION), steps=steps)
    # Rounding of the last bit.
    if noise_multiplier(share, length, devices) < multiplier:
        share = NoiseShare(deviation=share.deviation + 1, steps=steps)
    return share
