"""Checks of callers' arguments. Every error is a TrainingError that names the function and the argument."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real

from archipel.errors import TrainingError
from archipel.graph.model import Model


def number(
    function: str, name: str, value: object, low: float = 0.0, high: float = math.inf, *, ends: str = "[]"
) -> float:
    """`value` as a float, finite and from `low` to `high`; `ends` are the brackets of the interval in mathematics."""
    if isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value):
        result = float(value)
        above = result >= low if ends[0] == "[" else result > low
        if above and (result <= high if ends[1] == "]" else result < high):
            return result
    if ends == "[]" and math.isfinite(high):
        bounds = f"from {low:g} to {high:g}"
    else:
        bounds = f"at least {low:g}" if ends[0] == "[" else f"above {low:g}"
        if math.isfinite(high):
            bounds += f" and {'at most' if ends[1] == ']' else 'below'} {high:g}"
    raise TrainingError(f"{function}: {name} must be {bounds}, is {value!r}")


def whole(function: str, name: str, value: object, low: float = -math.inf) -> int:
    """`value` as an int of `low` or more."""
    if isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= low:
        return int(value)
    bounds = f" of {low:g} or more" if math.isfinite(low) else ""
    raise TrainingError(f"{function}: {name} must be a whole number{bounds}, is {value!r}")


def flag(function: str, name: str, value: object) -> bool:
    """`value`, which must be True or False."""
    if not isinstance(value, bool):  # not by truth: the text "no" is true
        raise TrainingError(f"{function}: {name} must be True or False, is {value!r}")
    return value


def numbers(function: str, name: str, values: object, low: float = 0.0) -> tuple[float, ...]:
    """A list, array or tensor of numbers of `low` or more."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TrainingError(f"{function}: {name} must be a list of numbers, is {values!r}")
    return tuple(number(function, f"{name}[{i}]", value, low) for i, value in enumerate(values))


def check_part(function: str, name: str, value: object, methods: Sequence[str]) -> None:
    """Refuse a `value` that lacks the methods of a loss, an optimizer or a transform."""
    # A class has the methods too: the likeliest mistake is to pass `losses.mse` and not `losses.mse()`.
    if isinstance(value, type) or not all(hasattr(value, method) for method in methods):
        call = f"; call it: {value.__name__}()" if callable(value) and hasattr(value, "__name__") else ""
        raise TrainingError(f"{function}: expected one of training.{name}, got {value!r}{call}")


def check_trained_model(function: str, model: object, trainable: object) -> None:
    """Refuse a `model` that is no Model, and a `trainable` that is no pattern or list of patterns."""
    if not isinstance(model, Model):
        raise TrainingError(
            f"{function}: model must be an archipel.Model, is {type(model).__name__}; Model.from_onnx reads a file, "
            "Model.from_torch takes a module"
        )
    check_patterns(function, trainable)


def check_patterns(function: str, trainable: object) -> None:
    """Refuse a `trainable` that is no pattern or list of patterns."""
    globs = [trainable] if isinstance(trainable, str) else trainable
    if not isinstance(globs, Sequence) or not all(isinstance(glob, str) for glob in globs):
        raise TrainingError(f"{function}: trainable must be a pattern or a list of patterns, is {trainable!r}")
