"""Strict reading of the small files of /proc and /sys that describe the device."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated, get_args

from msgspec import Meta

from archipel.errors import ClientError

_MAX_BYTES = 1 << 20

Percent = Annotated[float, Meta(gt=0, le=100)]
Load = Annotated[float, Meta(gt=0, le=100)]
"""Busy threads for each core."""
Celsius = Annotated[float, Meta(gt=-273.15, le=200)]
Bytes = Annotated[int, Meta(gt=0)]


def need_linux(setting: str) -> None:
    """Raises ClientError on a system without /proc and /sys."""
    if sys.platform not in ("linux", "android"):
        raise ClientError(
            f"{setting}: this condition is read from Linux's /proc and /sys, this is {sys.platform}; leave the setting "
            "out and pass a probe of your own (archipel.client.Probe)"
        )


def read_text(path: Path) -> str:
    """The file's text without surrounding white space. Raises ClientError if it cannot be read or is not ASCII."""
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_BYTES).decode("ascii").strip()
    except OSError as error:
        raise ClientError(f"{path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ClientError(f"{path} is not text") from None


def read_whole(path: Path, content: str | None = None) -> int:
    """The whole number in the file; `content` is its text if that was read already. Raises ClientError."""
    content = read_text(path) if content is None else content
    digits = content.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) < 20):
        raise ClientError(f"{path} has {content[:40]!r} where a whole number is expected")
    return int(content)


def list_folders(path: Path, pattern: str = "*") -> list[Path]:
    """The entries of `path` by name; none if there is no such folder. Raises ClientError if it cannot be listed."""
    try:
        return sorted(entry for entry in path.iterdir() if entry.match(pattern))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ClientError(f"{path} cannot be listed ({error.strerror})") from None


def check_number(setting: str, value: object, kind: object, unit: str) -> None:
    """Raises ClientError unless `value` is a number within the bounds of `kind`, a type at this file's top."""
    [bounds] = get_args(kind)[1:]
    most = math.inf if bounds.le is None else bounds.le
    # bool is a subclass of int, and `True` is no number of per cent.
    if isinstance(value, bool) or not isinstance(value, int | float) or not bounds.gt < value <= most:
        upper = "" if math.isinf(most) else f" and at most {most:g}"
        raise ClientError(f"{setting} must be a number of {unit} above {bounds.gt:g}{upper}, is {value!r}")
