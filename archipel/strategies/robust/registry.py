"""The tables of robust rules and of mixers. To add one: write NAME.py, add it here."""

from __future__ import annotations

import msgspec

from archipel.errors import PolicyError
from archipel.strategies.robust import (
    centered_clipping,
    fltrust,
    geometric_median,
    krum,
    median,
    mixing,
    norm_bounding,
    trimmed_mean,
)
from archipel.strategies.robust.rule import Mixer, Rule

MEAN = "mean"
"""The weighted mean, of a sum: no rule, and no single updates."""

RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        *(median.RULE, trimmed_mean.RULE, krum.KRUM, krum.MULTI_KRUM, geometric_median.RULE),
        *(centered_clipping.RULE, norm_bounding.RULE, fltrust.RULE),
    )
}

MIXERS: dict[str, Mixer] = {mixer.name: mixer for mixer in (mixing.NEAREST, mixing.BUCKETS)}


class Aggregation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a round's updates become one.

    Arguments:
        rule: "mean", or a name in RULES.
        tolerated: f, how many updates (or groups) may be arbitrary.
        mixing: "", or a name in MIXERS: what is done to the updates before the rule.
        most_bytes: the most memory that the single updates of a round may take, 2 GiB by default.

    Raises PolicyError for a name that there is not, and for settings that say nothing.
    """

    rule: str = MEAN
    tolerated: int = 0
    mixing: str = ""
    most_bytes: int = 2 << 30

    def __post_init__(self) -> None:
        if self.rule != MEAN and self.rule not in RULES:
            raise PolicyError(f"aggregation: no rule {self.rule!r}; there are: {', '.join([MEAN, *sorted(RULES)])}")
        if self.mixing and self.mixing not in MIXERS:
            raise PolicyError(f"mixing: there is no {self.mixing!r}; there are: {', '.join(sorted(MIXERS))}")
        if self.tolerated < 0:
            raise PolicyError(f"tolerated: {self.tolerated} is not 0 or more")
        if self.rule == MEAN and (self.tolerated or self.mixing):
            raise PolicyError("aggregation: the mean tolerates no arbitrary update; name a rule")

    @property
    def robust(self) -> bool:
        """Whether there is a rule."""
        return self.rule != MEAN
