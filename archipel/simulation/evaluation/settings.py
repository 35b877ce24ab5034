"""What is asked of an evaluation over devices."""

from __future__ import annotations

import msgspec

from archipel.errors import SimulationError
from archipel.protocol.messages.distributions import Bins


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How devices measure the model, each on its own examples.

    Arguments:
        hold_out: the share of each device's examples that it does not train with, above 0 and below 1: rounded, and at
            least one of a device that has two. A device with a single example is not measured.
        every: rounds between two evaluations; there is one after the last round in any case.
        devices: how many, drawn once from the run's seed, so that all evaluations ask the same ones; None: all.
        bins: by metric, those of the histogram that devices would count themselves in; a metric without has default
            ones.

    Raises SimulationError.

    Example:
        Evaluation(hold_out=0.2, every=5)
    """

    hold_out: float = 0.2
    every: int = 1
    devices: int | None = None
    bins: dict[str, Bins] = {}

    def __post_init__(self) -> None:
        if not 0 < self.hold_out < 1:
            raise SimulationError(f"evaluation.hold_out: {self.hold_out!r} is not above 0 and below 1")
        for name in ("every", "devices"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise SimulationError(f"evaluation.{name}: {value!r} is not a whole number of 1 or more")
