"""Strict reading of the small files in which Linux says how the device is."""

from __future__ import annotations

import math
import sys
from pathlib import Path

from archipel.errors import ClientError

_MAX_BYTES = 1 << 20


def need_linux(setting: str) -> None:
    """Raises ClientError where there is no /proc and /sys to read."""
    if sys.platform not in ("linux", "android"):
        raise ClientError(
            f"{setting}: this condition is read from Linux's /proc and /sys, this is {sys.platform}; leave the setting "
            "out and pass a probe of your own (archipel.client.Probe)"
        )


def text(path: Path) -> str:
    """The file without the space around it. Raises ClientError where it cannot be read or is not ASCII."""
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_BYTES).decode("ascii").strip()
    except OSError as error:
        raise ClientError(f"{path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ClientError(f"{path} is not text") from None


def whole(path: Path, found: str | None = None) -> int:
    """The whole number in the file, or that it `found` in it. Raises ClientError."""
    found = text(path) if found is None else found
    digits = found.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) < 20):
        raise ClientError(f"{path} has {found[:40]!r} where a whole number is expected")
    return int(found)


def folders(path: Path, pattern: str = "*") -> list[Path]:
    """Those in `path`, by name; none where there is no such folder. Raises ClientError where it cannot be listed."""
    try:
        return sorted(entry for entry in path.iterdir() if entry.match(pattern))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ClientError(f"{path} cannot be listed ({error.strerror})") from None


def number(setting: str, value: object, least: float, most: float, unit: str) -> None:
    """Raises ClientError unless `value` is a number above `least` and at most `most`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least < value <= most:
        upper = "" if math.isinf(most) else f" and at most {most:g}"
        raise ClientError(f"{setting} must be a number of {unit} above {least:g}{upper}, is {value!r}")
