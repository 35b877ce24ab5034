"""Checks of the arguments of `convert`. Every error is a ConversionError that begins with the argument's name."""

from __future__ import annotations

import math
from types import UnionType
from typing import Any

import msgspec

from archipel.errors import ConversionError


def check_instance(where: str, value: object, kind: type[Any] | UnionType, expected: str) -> None:
    """Refuse a `value` that is not of `kind`; the error text says `expected`."""
    if not isinstance(value, kind):
        raise ConversionError(f"{where}: expected {expected}, got {_shown(value)}")


def check_whole(where: str, value: object, low: int, high: int | None = None) -> None:
    """Refuse a `value` that is not an int from `low` to `high` (None: no limit); manifests hold no NumPy numbers."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high):
        return
    bounds = f"of {low} or more" if high is None else f"from {low} to {high}"
    raise ConversionError(f"{where}: expected a whole number {bounds}, got {_shown(value)}")


def check_number(where: str, value: object, low: float, high: float) -> None:
    """Refuse a `value` that is not a number from `low` to `high`."""
    if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
        return
    raise ConversionError(f"{where}: expected a number from {low:g} to {high:g}, got {_shown(value)}")


def check_above_zero(where: str, value: object) -> None:
    """Refuse a `value` that is not a finite number above 0."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return
    raise ConversionError(f"{where}: expected a number above 0, got {_shown(value)}")


def check_struct(where: str, value: object, kind: type[msgspec.Struct]) -> None:
    """Refuse a struct whose fields are not of the types that it declares, as reading it from a manifest would."""
    check_instance(where, value, kind, f"a bundle.{kind.__name__}")
    # msgspec checks types when it decodes, not when a struct is made.
    try:
        msgspec.json.decode(msgspec.json.encode(value), type=kind)
    except (msgspec.ValidationError, TypeError) as error:
        raise ConversionError(f"{where}: {error}") from None


def _shown(value: object) -> str:
    text = repr(value)  # cut off: it may be a whole array
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
