"""Imports the libraries of the extra `data`, when a file needs them."""

from __future__ import annotations

import importlib
from typing import Any

from archipel.errors import MissingExtraError


def need(module: str, package: str = "") -> Any:
    """The module. Raises MissingExtraError where the package (by default of the same name) is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtraError(package or module.partition(".")[0], "data") from None


def arrow_errors() -> tuple[type[Exception], ...]:
    """What pyarrow raises for a file that it cannot read, also where there is no memory for what a file announces."""
    # Most of its errors are also ValueError, OSError and the like; some, such as those of what it has not implemented,
    # are others.
    return OSError, ValueError, TypeError, KeyError, IndexError, NotImplementedError, MemoryError
