"""How a round's updates become one: what a task says of it, and a simulation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta

from archipel.errors import PolicyError
from archipel.protocol.messages import MAX_COHORT, Message
from archipel.protocol.mistakes import tell

MEAN = "mean"
"""The weighted mean, of a sum: no rule, and no single updates."""
RULE_NAMES = (
    "centered-clipping", "fltrust", "geometric-median", "krum", "median", "multi-krum", "norm-bounding", "trimmed-mean",
)  # fmt: skip
MIXER_NAMES = ("bucketing", "nnm")
ROOTED = "fltrust"
"""The rule that compares updates with one of examples that the operator trusts."""


class AggregationError(PolicyError, ValueError):
    """Also a ValueError: then a decoder that meets it says in which field."""


class Aggregation(Message, frozen=True, kw_only=True, omit_defaults=False):
    """How a round's updates become one.

    Arguments:
        rule: "mean", or one of RULE_NAMES; archipel.strategies.robust has the functions.
        tolerated: f, how many updates (or groups) may be arbitrary.
        mixing: "", or one of MIXER_NAMES: what is done to the updates before the rule.
        most_bytes: the most memory that the single updates of a round may take, 2 GiB by default.
        root: of a task with rule "fltrust": the id of the device whose update the others are compared with; the
            operator runs it on examples that the operator trusts. A simulation has examples of the server's own.

    Raises AggregationError for a name that there is not, and for settings that say nothing.

    Example:
        Aggregation(rule="median", tolerated=2)
    """

    rule: str = MEAN
    tolerated: Annotated[int, Meta(ge=0, le=MAX_COHORT)] = 0
    mixing: str = ""
    most_bytes: Annotated[int, Meta(ge=1, le=1 << 50)] = 2 << 30
    root: Annotated[str, Meta(max_length=32, pattern="^([0-9a-f]{32})?$")] = ""

    def __post_init__(self) -> None:
        if mistakes := list(self._mistakes()):
            raise AggregationError(tell(mistakes))

    @property
    def robust(self) -> bool:
        """Whether there is a rule."""
        return self.rule != MEAN

    def _mistakes(self) -> Iterator[str]:
        if self.rule != MEAN and self.rule not in RULE_NAMES:
            yield f"rule: there is no {self.rule!r}; there are: {', '.join([MEAN, *RULE_NAMES])}"
        if self.mixing and self.mixing not in MIXER_NAMES:
            yield f"mixing: there is no {self.mixing!r}; there are: {', '.join(MIXER_NAMES)}"
        if self.tolerated < 0:
            yield f"tolerated: {self.tolerated} is not 0 or more"
        if self.rule == MEAN and (self.tolerated or self.mixing):
            yield "tolerated, mixing: the mean tolerates no arbitrary update; name a rule"
        if self.root and self.rule != ROOTED:
            yield f"root: rule {self.rule!r} takes no update as a root; {ROOTED!r} does"
