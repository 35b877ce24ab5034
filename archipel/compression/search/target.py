"""Targets of a search: `size<100kB, accuracy>=-0.5, latency<=0.5x, flops<50%`.

    target     = condition { "," condition }
    condition  = "size" less number size-unit | "flops" less number flops-unit | "latency" less number latency-unit
               | "accuracy" more ( [sign] number | number "%" )
    less, more = "<" | "<=", ">" | ">="
    size-unit  = "B" | "kB" | "MB" | "KiB" | "MiB" | relative        latency-unit = "us" | "ms" | "s" | relative
    flops-unit = "FLOPs" | "k" | "M" | "G" | relative                relative     = "%" | "x", of the original

An accuracy without % is in points against the original: -0.5 allows a loss of half a point.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NoReturn

from archipel.compression.search.point import Metrics
from archipel.errors import CompressionError

Quantity = Literal["size", "accuracy", "latency", "flops"]
Kind = Literal["absolute", "ratio", "points"]

UNITS: dict[str, dict[str, float]] = {
    "size": {"B": 1, "kB": 1e3, "MB": 1e6, "KiB": 1024, "MiB": 1024**2},
    "latency": {"us": 1, "ms": 1e3, "s": 1e6},
    "flops": {"FLOPs": 1, "k": 1e3, "M": 1e6, "G": 1e9},
}
"""Units of absolute numbers, in bytes, microseconds and FLOPs."""
RELATIVE = {"%": 0.01, "x": 1.0}
POINT_WEIGHT = 10.0
"""The weight of missing accuracy against bytes, FLOPs or time beyond their bound: 1 point counts like 10 %."""
_ROUNDING = 1e-9  # of a bound: nearer values count as equal

_NAME = re.compile(r"[A-Za-z_]+")
_OPERATOR = re.compile(r"<=|>=|<|>")
_NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?")
_UNIT = re.compile(r"[A-Za-zµμ]+|%")
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class Condition:
    """One bound. `value`: bytes, FLOPs, microseconds or a share (kind "absolute"), a factor ("ratio"), or points."""

    quantity: Quantity
    strict: bool
    value: float
    kind: Kind
    text: str

    def bound(self, original: Metrics) -> float:
        """The limit in bytes, FLOPs, microseconds or accuracy from 0 to 1; a latency ratio stays a ratio."""
        if self.kind == "points":
            if original.accuracy is None:
                raise CompressionError(f"{self.text}: the loss of this search has no accuracy")
            return original.accuracy + self.value / 100
        if self.kind == "ratio" and self.quantity != "latency":
            return self.value * (original.nbytes if self.quantity == "size" else original.flops)
        return self.value

    def excess(self, metrics: Metrics, original: Metrics) -> float:
        """How far `metrics` is on the wrong side, as a share of the bound; at most 0 where the condition is met."""
        bound = self.bound(original)
        if self.quantity == "accuracy":
            if metrics.accuracy is None:
                raise CompressionError(f"{self.text}: the loss of this search has no accuracy")
            share = POINT_WEIGHT * (bound - metrics.accuracy)
        else:
            share = self._quantity_of(metrics) / bound - 1.0
        if abs(share) < _ROUNDING:
            # On the bound, which <= and >= include.
            return _ROUNDING if self.strict else 0.0
        return share

    def _quantity_of(self, metrics: Metrics) -> float:
        if self.quantity == "latency":
            return metrics.latency_ratio if self.kind == "ratio" else metrics.latency_us
        return float(metrics.nbytes if self.quantity == "size" else metrics.flops)


@dataclass(frozen=True)
class Target:
    """Conditions that a compressed model must meet, all of them."""

    conditions: tuple[Condition, ...]

    @property
    def quantities(self) -> frozenset[str]:
        return frozenset(condition.quantity for condition in self.conditions)

    def excesses(self, metrics: Metrics, original: Metrics) -> dict[str, float]:
        """By quantity: above 0 where the condition is not met."""
        return {c.quantity: c.excess(metrics, original) for c in self.conditions}

    def met(self, metrics: Metrics, original: Metrics) -> bool:
        return all(excess <= 0 for excess in self.excesses(metrics, original).values())

    def distance(self, metrics: Metrics, original: Metrics) -> float:
        """0 where every condition is met; else the sum of what is missing (see POINT_WEIGHT)."""
        return sum(max(excess, 0.0) for excess in self.excesses(metrics, original).values())

    def missed(self, metrics: Metrics, original: Metrics) -> tuple[str, ...]:
        """The conditions that are not met, as they were written."""
        return tuple(c.text for c in self.conditions if c.excess(metrics, original) > 0)

    def __str__(self) -> str:
        return ", ".join(condition.text for condition in self.conditions)


def parse_target(text: str) -> Target:
    """Read a target. Raises CompressionError with the text and a mark under the wrong place."""
    conditions: list[Condition] = []
    at = 0
    # Condition by condition, as in the grammar above; `at` is the position in the text.
    while True:
        start = _skip(text, at)
        condition, at = _condition(text, start)
        if any(condition.quantity == other.quantity for other in conditions):
            _fail(text, start, f"{condition.quantity} is there twice")
        conditions.append(condition)
        at = _skip(text, at)
        if at == len(text):
            return Target(tuple(conditions))
        if text[at] != ",":
            _fail(text, at, "expected a comma or the end")
        at += 1


def _condition(text: str, start: int) -> tuple[Condition, int]:
    name, at = _take(_NAME, text, start)
    if name not in ("size", "accuracy", "latency", "flops"):
        _fail(text, start, "expected size, accuracy, latency or flops")
    quantity: Quantity = name  # type: ignore[assignment]
    place = _skip(text, at)
    operator, at = _take(_OPERATOR, text, place)
    allowed = (">=", ">") if quantity == "accuracy" else ("<=", "<")
    if operator not in allowed:
        _fail(text, place, f"expected {allowed[0]} or {allowed[1]} after {quantity}")
    place = _skip(text, at)
    number, at = _take(_NUMBER, text, place)
    if not number:
        _fail(text, place, "expected a number")
    unit_place = _skip(text, at)
    unit, end = _take(_UNIT, text, unit_place)
    unit = {"µs": "us", "μs": "us"}.get(unit, unit)
    value = float(number)
    kind: Kind
    if quantity == "accuracy":
        value, kind = _accuracy(text, number, unit, place, unit_place)
    else:
        units = UNITS[quantity]
        if unit not in units and unit not in RELATIVE:
            _fail(text, unit_place, f"expected a unit of {quantity}: {', '.join(units)}, or % or x of the original's")
        if value <= 0:
            _fail(text, place, f"expected a {quantity} above 0")
        kind = "ratio" if unit in RELATIVE else "absolute"
        value *= RELATIVE[unit] if unit in RELATIVE else units[unit]
    if not unit:
        end = at
    return Condition(quantity, operator in "<>", value, kind, " ".join(text[start:end].split())), end


def _accuracy(text: str, number: str, unit: str, place: int, unit_place: int) -> tuple[float, Kind]:
    value = float(number)
    if unit == "%":
        if number[0] in "+-" or value > 100:
            _fail(text, place, "expected an accuracy from 0% to 100%; without % it is points against the original")
        return value / 100, "absolute"
    if unit:
        _fail(text, unit_place, "expected nothing (points against the original) or % (an accuracy)")
    if value > 0 and number[0] != "+":
        _fail(text, place, f"expected a sign, or %: +{number} is points above the original, {number}% an accuracy")
    return value, "points"


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def _take(pattern: re.Pattern[str], text: str, at: int) -> tuple[str, int]:
    match = pattern.match(text, at)
    return ("", at) if match is None else (match.group(), match.end())


def _fail(text: str, at: int, message: str) -> NoReturn:
    line = " ".join(text.splitlines()) if "\n" in text else text
    raise CompressionError(f"target: {message}\n  {line}\n  {' ' * at}^")
