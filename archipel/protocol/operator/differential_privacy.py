"""Noise on the server: what a task says of it, and what it has cost."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from archipel.errors import PolicyError
from archipel.protocol.messages import Message, Name, Whole

Mechanism = Literal["none", "central"]
_MOST = 1e6


class DifferentialPrivacyError(PolicyError, ValueError):
    """Also a ValueError: then a decoder that meets it says in which field."""


class DifferentialPrivacy(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Noise that the server adds to the sum of each round of a training (docs/privacy.md).

    Arguments:
        mechanism: "none", or "central": discrete Gaussian noise.
        noise_multiplier: its standard deviation, over the most by which one device can change the sum. Null: the least
            with which all rounds of the task cost `epsilon`.
        epsilon: what the model may cost each device of the population, in all tasks together; the task ends before the
            round that would cost more. Null: no limit.
        delta: the probability with which the bound may fail; choose it well below 1 / (number of devices).

    Raises DifferentialPrivacyError for settings that say nothing.
    """

    mechanism: Mechanism = "none"
    noise_multiplier: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    epsilon: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    delta: Annotated[float, Meta(gt=0, lt=1)] = 1e-6

    def __post_init__(self) -> None:
        if self.mechanism not in ("none", "central"):
            raise DifferentialPrivacyError(f"mechanism: there is no {self.mechanism!r}; there are: none, central")
        for name, most in (("noise_multiplier", _MOST), ("epsilon", _MOST), ("delta", 1 - 2**-53)):
            value = getattr(self, name)
            if value is not None and not 0 < value <= most:
                raise DifferentialPrivacyError(f"{name}: {value} is not above 0 and below {most:g}")
        given = self.noise_multiplier is not None or self.epsilon is not None
        if self.is_central and not given:
            raise DifferentialPrivacyError("noise_multiplier, epsilon: mechanism 'central' needs one of them, or both")
        if not self.is_central and given:
            raise DifferentialPrivacyError("mechanism: noise_multiplier and epsilon are for 'central'; set it")

    @property
    def is_central(self) -> bool:
        """Whether the server adds noise."""
        return self.mechanism == "central"


class PrivacySpent(Message, frozen=True, kw_only=True, omit_defaults=False):
    """What the released versions of a model have cost each device of a population, in all tasks together.

    Everything that they show is (`epsilon`, `delta`)-differentially private, by `accountant`, of `releases` sums.
    `unit` is whose data are protected, `sampling` what was assumed of who is in a round, `trust` who sees more than the
    bound allows, `covers` what it is about and what not.
    """

    population: Name
    model: str
    epsilon: float
    delta: float
    releases: Whole
    accountant: str
    unit: str
    sampling: str
    trust: str
    covers: str
