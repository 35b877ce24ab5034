"""What is tuned: ranges of settings, the metric that decides, and how many rounds may be spent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from archipel.errors import SimulationError
from archipel.protocol import written
from archipel.protocol.mistakes import Mistakes, split, tell

Value = float | int | str | bool


class Range(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numbers from `low` to `high`: whole ones where both are whole and neither is written with a point; evenly, or
    with `log` evenly on a logarithmic scale. Raises SimulationError.

    Example:
        Range(low=0.01, high=1.0, log=True)
    """

    low: int | float
    high: int | float
    log: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise SimulationError(f"low {self.low!r} and high {self.high!r} must be numbers with low below high")
        if self.log and self.low <= 0:
            raise SimulationError(f"low {self.low!r} of a range with log = true must be above 0")

    @property
    def whole(self) -> bool:
        """Whether only whole numbers are drawn."""
        return isinstance(self.low, int) and isinstance(self.high, int)


class TuneSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How settings are tuned.

    Arguments:
        ranges: by the setting's name, such as "lr", a hyperparameter, or "strategy.mu", a Range, or a list of values to
            choose from.
        trials: how many, each a run with other values.
        budget: rounds of all trials together, after which no trial begins; None: no such limit.
        metric: what decides: "test accuracy" or another metric of the test data, "training loss" and the like, or of
            the devices' own examples "accuracy mean over devices", "accuracy worst 10%"; "", in a file: the accuracy of
            the test data, else their loss, and without test data the mean over devices.
        better: whether a higher value is better or a lower one; None: lower for a loss.
        pruner: "halving" ends trials early by successive halving, "hyperband" by several such brackets, "none" never.
        least_rounds: of every trial, before it may be ended; None: a ninth of the rounds, with a `reduction` of 3.
        reduction: of so many trials that came to a rung, one goes on to the next one, which is as many times as far.

    Raises SimulationError.

    Example:
        TuneSettings(ranges={"lr": Range(low=0.01, high=1.0, log=True)}, trials=10)
    """

    ranges: dict[str, Range | list[Value]]
    trials: int = 20
    budget: int | None = None
    metric: str = ""
    better: Literal["higher", "lower"] | None = None
    pruner: Literal["halving", "hyperband", "none"] = "halving"
    least_rounds: int | None = None
    reduction: int = 3

    def __post_init__(self) -> None:
        mistakes = Mistakes()
        if not self.ranges:
            mistakes.add(SimulationError("tune: has no range; give lr = { low = 0.001, high = 1.0, log = true }, say"))
        for name, least in (("trials", 1), ("budget", 1), ("least_rounds", 1), ("reduction", 2)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                mistakes.add(SimulationError(f"tune.{name}: {value!r} is not a whole number of {least} or more"))
        for name, values in self.ranges.items():
            if not isinstance(values, Range) and len({repr(value) for value in values}) != max(len(values), 2):
                text = f"tune.{name}: give two or more different values to choose from, got {values!r}"
                mistakes.add(SimulationError(text))
        mistakes.tell(SimulationError)


_OWN = tuple(name for name in TuneSettings.__struct_fields__ if name != "ranges")


def read_tuning(table: Mapping[str, Any]) -> TuneSettings:
    """The table [tune] of a federation's file: fields of TuneSettings, and everything else is a range.

    Raises SimulationError that names each field with a mistake.
    """
    own = {name: table[name] for name in _OWN if name in table}
    ranges: dict[str, Any] = {}
    mistakes = Mistakes()
    for name, value in _leaves({name: value for name, value in table.items() if name not in own}, ""):
        try:
            ranges[name] = _read_range(name, value)
        except (ValueError, SimulationError) as error:
            mistakes.add(SimulationError(tell([f"tune.{name}: {each}" for each in split(str(error))])))
            ranges[name] = _ANY  # what else is wrong is told, too
    try:
        # Written ranges are structs already, and a struct converts to itself.
        settings = written.convert({**own, "ranges": ranges}, TuneSettings)
    except SimulationError as error:
        mistakes.add(error)
    except ValueError as error:
        # What the struct itself says has its name already.
        texts = [each if each.startswith("tune.") else f"tune.{each}" for each in split(str(error))]
        mistakes.add(SimulationError(tell(texts)))
    mistakes.tell(SimulationError)
    return settings


_ANY = Range(low=0.0, high=1.0)


def _read_range(name: str, value: Any) -> Range | list[Value]:
    """Raises SimulationError or ValueError without the field's name."""
    if name.partition(".")[0] in ("rounds", "run", "tune"):
        raise SimulationError("decides how a trial runs, and cannot be tuned")
    if isinstance(value, dict):
        return written.convert(value, Range)
    if not isinstance(value, list):
        raise SimulationError("expected a range such as { low = 0.001, high = 1.0, log = true }, or a list of values")
    if any(not isinstance(each, Value) for each in value):
        raise SimulationError(f"expected numbers or texts to choose from, got {value!r}")
    return value


def _leaves(table: Mapping[str, Any], before: str) -> Iterator[tuple[str, Any]]:
    """The entries of nested tables by dotted name; a table with `low` or `high` is one entry."""
    for name, value in table.items():
        if isinstance(value, dict) and not {"low", "high"} & set(value):
            yield from _leaves(value, f"{before}{name}.")
        else:
            yield before + name, value


def is_lower_better(settings: TuneSettings, metric: str) -> bool:
    """Whether the lower value of the metric is the better one."""
    return settings.better == "lower" if settings.better is not None else "loss" in metric


def as_settings(values: Mapping[str, Value], fields: Sequence[str]) -> list[str]:
    """A trial's values as KEY=VALUE, as `load_federation` takes them: what no field of the file begins with is a
    hyperparameter."""
    return [
        f"{name if name.partition('.')[0] in fields else f'hyperparameters.{name}'}="
        f"{msgspec.json.encode(value).decode()}"
        for name, value in values.items()
    ]
