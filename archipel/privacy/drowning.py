"""How long a round's noise is beside what devices can change, and what would help where it is longer.

The mean of n devices' changes is at most as long as their clip. Noise of standard deviation s in each of p elements of
the sum makes a vector of expected length s sqrt(p) / n of the mean, whatever direction the devices agree on. Where that
is more than the clip, a round moves the model at random more than it can learn. Rounds add up what devices agree on,
and noise only with the square root of their number, so a model can still learn; docs/privacy.md says what was left of
accuracy at several lengths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import msgspec
import numpy as np

from archipel.errors import MissingExtraError
from archipel.privacy.accounting import spent_epsilon
from archipel.privacy.central import events_of, noise_scale
from archipel.privacy.events import Event, Gaussian, Repeated
from archipel.privacy.factorization import first_inverse_column
from archipel.protocol.bounds import entries, step
from archipel.protocol.messages import NoiseShare
from archipel.protocol.noised.group import noised_group
from archipel.protocol.operator.differential_privacy import DifferentialPrivacy
from archipel.protocol.vector import Layout

_MUCH = 4.0
"""Times the clip: so much noise left half of a model's accuracy, and less (docs/privacy.md)."""
_MOST_EPSILON = 100.0
"""A larger one is no advice."""


@dataclass(frozen=True)
class MeanNoise:
    """The noise on the mean of a round's changes.

    Attributes:
        norm: its expected L2 norm. Of correlated noise: of independent noise that leaves a model, which adds up all
            rounds, with the same error; of mechanism "local": before a device shortens its noisy changes.
        clip: the most that the mean can be long without it.
        elements: how many numbers get noise.
        devices: in the mean.
    """

    norm: float
    clip: float
    elements: int
    devices: int

    @property
    def ratio(self) -> float:
        """How many times as long as the longest mean the noise is."""
        return self.norm / self.clip


def mean_noise(
    settings: DifferentialPrivacy, layout: Layout, *, devices: int, rounds: int, share: NoiseShare | None = None
) -> MeanNoise:
    """The noise that a round of so many devices gets.

    Arguments:
        settings: settled ones.
        layout: of the uploads, with the clip of the round's plan.
        rounds: of the task, over which correlated noise is made up for.
        share: what each device adds, where devices do.

    Raises PolicyError for a layout or settings that have no such noise, MissingExtraError for correlated noise without
    SciPy.
    """
    group = noised_group(layout, "", settings.mechanism)
    elements = sum(entries(port) for port in group.ports)
    if share is not None:
        one = share.deviation / share.steps * group.bound
        return MeanNoise(one * math.sqrt(elements / devices), group.bound, elements, devices)
    scale = noise_scale(group, settings.noise_multiplier or 0.0) * _accumulated(settings.coefficients, rounds)
    norm = scale * math.sqrt(sum(entries(port) * step(port) ** 2 for port in group.ports)) / devices
    return MeanNoise(norm, group.bound, elements, devices)


def drowning_hint(settings: DifferentialPrivacy, noise: MeanNoise, rounds: int) -> str:
    """What to tell people where a round's noise is longer than any mean of changes, with what would help; "" else.

    Arguments:
        settings: settled ones.
        noise: as `mean_noise` returned it.
        rounds: of the task.
    """
    ratio = noise.ratio
    if ratio <= 1:
        return ""
    alone = settings.mechanism == "local"  # then the noise of n devices grows with the root of n
    remedies = [f"{math.ceil(noise.devices * (ratio**2 if alone else ratio)):,} devices a round"]
    if fewer := math.floor(noise.elements / ratio**2):
        remedies.append(f"{fewer:,} trained parameters in place of {noise.elements:,} (lora, a frozen backbone)")
    remedies += _less_noise(settings, ratio, rounds)
    result = "the model will hardly learn" if ratio > _MUCH else "expect clearly less accuracy"
    norm, times, clip = _digits(noise.norm, 3), _digits(ratio, 2), _digits(noise.clip, 3)
    return (
        f"privacy noise drowns the updates: on the mean of {noise.devices:,} devices it is expected to have a norm of "
        f"{norm}, {times} times the clip of {clip}, which no mean exceeds; {result}. What would help, each by itself: "
        f"{'; '.join(remedies)}"
    )


def _digits(value: float, digits: int) -> str:
    """So many digits, without an exponent where there are more before the point."""
    return f"{value:,.0f}" if value >= 10**digits else f"{value:.{digits}g}"


def _less_noise(settings: DifferentialPrivacy, ratio: float, rounds: int) -> list[str]:
    """The advice to take an epsilon with so much less noise, where one that is worth something has."""
    multiplier = settings.noise_multiplier or 0.0
    less = msgspec.structs.replace(settings, noise_multiplier=multiplier / ratio)
    said = f"noise_multiplier {less.noise_multiplier:.3g} in place of {multiplier:.3g}"
    events: list[Event] = [Repeated(event=Gaussian(noise_multiplier=multiplier / ratio), count=rounds)]
    try:
        epsilon = spent_epsilon(events if settings.on_devices else events_of(less, 0, rounds), settings.delta)
    except MissingExtraError:
        return [said]
    if epsilon > _MOST_EPSILON:
        return []
    instead = "" if settings.epsilon is None else f" in place of {settings.epsilon:g}"
    return [f"an epsilon of {epsilon:.3g}{instead} ({said})"]


@lru_cache(maxsize=64)
def _accumulated(coefficients: tuple[int, ...], rounds: int) -> float:
    """The error of a model that has added up all rounds so far, over that with independent noise: the root of the
    means of both squares over the rounds. 1 without coefficients."""
    if not coefficients:
        return 1.0
    decoder = np.cumsum(first_inverse_column([each / coefficients[0] for each in coefficients], rounds))
    return math.sqrt(float(np.cumsum(decoder**2).mean()) / ((rounds + 1) / 2))
