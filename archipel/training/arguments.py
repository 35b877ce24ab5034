"""Arguments that callers hand over, checked where they come in. Every error is a TrainingError with both names."""

from __future__ import annotations

import math
from numbers import Real

from archipel.errors import TrainingError


def number(
    function: str, name: str, value: object, low: float = 0.0, high: float = math.inf, *, ends: str = "[]"
) -> float:
    """`value` as a float, finite and from `low` to `high`; `ends` says as in mathematics which ends belong to it."""
    if isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value):
        found = float(value)
        above = found >= low if ends[0] == "[" else found > low
        if above and (found <= high if ends[1] == "]" else found < high):
            return found
    if ends == "[]" and math.isfinite(high):
        bounds = f"from {low:g} to {high:g}"
    else:
        bounds = f"at least {low:g}" if ends[0] == "[" else f"above {low:g}"
        if math.isfinite(high):
            bounds += f" and {'at most' if ends[1] == ']' else 'below'} {high:g}"
    raise TrainingError(f"{function}: {name} must be {bounds}, is {value!r}")


def whole(function: str, name: str, value: object, low: float = -math.inf) -> int:
    """`value` as an int of `low` or more."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= low:
        return value
    bounds = f" of {low:g} or more" if math.isfinite(low) else ""
    raise TrainingError(f"{function}: {name} must be a whole number{bounds}, is {value!r}")
