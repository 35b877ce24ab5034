"""Noise on sums of devices: what a task says of it, and what it has cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta

from archipel.errors import PolicyError
from archipel.protocol.messages import Message, Name, Whole
from archipel.protocol.mistakes import tell

Mechanism = Literal["none", "central", "correlated", "distributed", "local"]
MAX_BANDS = 64
"""Coefficients at most: the server keeps the noise of so many rounds, less one, each as large as two models."""
MAX_UNIT = 1 << 16
_MOST = 1e6
_NAMES = ("none", "central", "correlated", "distributed", "local")


class DifferentialPrivacyError(PolicyError, ValueError):
    """Also a ValueError: then a decoder that meets it says in which field."""


class DifferentialPrivacy(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Noise on the sum of each round of a task (docs/privacy.md). Evaluations and analyses have "central" alone.

    Arguments:
        mechanism: "none"; "central": the server adds discrete Gaussian noise; "correlated": the same, less a part of
            the noise of earlier rounds; "distributed": each device adds a share of it before it masks its update;
            "local": each device of a plain round adds all of it to its own.
        noise_multiplier: the standard deviation of what a round's noise has that earlier rounds' has not, over the most
            by which one device can change the sum; of "distributed" that of the fewest devices that a round accepts,
            less those that may work with the server, of "local" that of one device. Null: the least with which all
            rounds of the task cost `epsilon`.
        epsilon: what the model may cost each device of the population, in all tasks together; the task ends before the
            round that would cost more. Null: no limit.
        delta: the probability with which the bound may fail; choose it well below 1 / (number of devices).
        separation: of "correlated": a device that was in a sum is in none of the `separation` - 1 that follow.
        coefficients: of "correlated": how much of earlier rounds' noise a round takes back, see
            archipel.privacy.factorization: whole numbers, the first of which stands for 1. Empty: the best for the
            task's number of rounds.
        clip_noise: of "central", for a bundle whose clip the server adapts: the standard deviation of the noise on the
            count of devices that clipped their updates, in devices. Null: the clip is not adapted.

    Raises DifferentialPrivacyError for settings that say nothing, with all that is wrong.

    Example:
        DifferentialPrivacy(mechanism="central", epsilon=8.0, delta=1e-6)
    """

    mechanism: Mechanism = "none"
    noise_multiplier: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    epsilon: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    delta: Annotated[float, Meta(gt=0, lt=1)] = 1e-6
    separation: Annotated[int, Meta(ge=2, le=1_000_000)] | None = None
    coefficients: Annotated[tuple[int, ...], Meta(max_length=MAX_BANDS)] = ()
    clip_noise: Annotated[float, Meta(ge=1, le=1e6)] | None = None

    def __post_init__(self) -> None:
        if mistakes := list(self._mistakes()):
            raise DifferentialPrivacyError(tell(mistakes))

    @property
    def is_private(self) -> bool:
        """Whether sums have noise."""
        return self.mechanism != "none"

    @property
    def is_central(self) -> bool:
        """Whether the server adds it."""
        return self.mechanism in ("central", "correlated")

    @property
    def draws_again(self) -> bool:
        """Whether a round that is aggregated again gets other noise, and so costs again."""
        return self.mechanism == "central"

    @property
    def is_distributed(self) -> bool:
        """Whether each device adds a share of it."""
        return self.mechanism == "distributed"

    @property
    def on_devices(self) -> bool:
        """Whether devices add it."""
        return self.mechanism in ("distributed", "local")

    @property
    def is_correlated(self) -> bool:
        """Whether a round takes back noise of earlier ones."""
        return self.mechanism == "correlated"

    def _mistakes(self) -> Iterator[str]:
        known = self.mechanism in _NAMES
        if not known:
            yield f"mechanism: there is no {self.mechanism!r}; there are: {', '.join(_NAMES)}"
        for name, most in (("noise_multiplier", _MOST), ("epsilon", _MOST), ("delta", 1 - 2**-53)):
            value = getattr(self, name)
            if value is not None and not 0 < value <= most:
                yield f"{name}: {value} is not above 0 and below {most:g}"
        given = self.noise_multiplier is not None or self.epsilon is not None
        if known and self.is_private and not given:
            yield f"noise_multiplier, epsilon: mechanism {self.mechanism!r} needs one of them, or both"
        if not self.is_private and given:
            yield "mechanism: noise_multiplier and epsilon are for 'central' and others; set it"
        if known:
            yield from self._mistakes_of_correlation()
        if self.clip_noise is None:
            return
        if known and self.mechanism != "central":
            yield (
                f"clip_noise: with mechanism {self.mechanism!r} the clip is not adapted, which only 'central' can do; "
                "leave it away"
            )
        if not 1 <= self.clip_noise <= _MOST:
            yield f"clip_noise: {self.clip_noise} is not from 1 to {_MOST:g} devices"

    def _mistakes_of_correlation(self) -> Iterator[str]:
        given = self.coefficients
        if not self.is_correlated:
            if self.separation is not None or given:
                yield "mechanism: separation and coefficients are for 'correlated'; set it"
            return
        if self.separation is None or self.separation < 2:
            yield (
                f"separation: {'is missing' if self.separation is None else f'{self.separation} is below 2'}; "
                "mechanism 'correlated' needs to know in how many rounds a device may come again, 2 or more; where it "
                "may come in the next one, take 'central'"
            )
        if len(given) > MAX_BANDS:
            yield f"coefficients: {len(given)} are more than {MAX_BANDS}"
        if given and not (given[0] <= MAX_UNIT and given[-1] > 0 and list(given) == sorted(given, reverse=True)):
            yield f"coefficients: expected whole numbers from {MAX_UNIT} down to 1, none above the one before"


class PrivacySpent(Message, frozen=True, kw_only=True, omit_defaults=False):
    """What the released versions of a model have cost each device of a population, in all tasks together.

    Everything that they show is (`epsilon`, `delta`)-differentially private, by `accountant`, of `releases` sums; but
    `exact` further ones, of rounds of the model's trainings, evaluations and analyses without noise, have no bound.
    `unit` is whose data are protected, `sampling` what was assumed of who is in a round, `trust` who sees more than the
    bound allows, `covers` what it is about and what not.
    """

    population: Name
    model: str
    epsilon: float
    delta: float
    releases: Whole
    exact: Whole
    accountant: str
    unit: str
    sampling: str
    trust: str
    covers: str
