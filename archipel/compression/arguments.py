"""Checks of the fields of parts."""

from __future__ import annotations

from archipel.errors import CompressionError


def check_whole(part: object, *names: str) -> None:
    """Raise CompressionError unless these fields are whole numbers from 1."""
    for name in names:
        value = getattr(part, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CompressionError(f"{_kind(part)}: {name} must be a whole number from 1, is {value!r}")


def check_choices(part: object, **allowed: tuple[object, ...]) -> None:
    """Raise CompressionError unless each field is one of the values allowed."""
    for name, values in allowed.items():
        if getattr(part, name) not in values:
            listed = ", ".join(map(str, values))
            raise CompressionError(f"{_kind(part)}: {name} is one of {listed}, got {getattr(part, name)!r}")


def check_percent(part: object, name: str) -> None:
    """Raise CompressionError unless the field is above 50 and at most 100."""
    value = getattr(part, name)
    if not isinstance(value, int | float) or not 50 < value <= 100:
        raise CompressionError(f"{_kind(part)}: {name} must be above 50 and at most 100, is {value!r}")


def _kind(part: object) -> str:
    return type(part).__name__
