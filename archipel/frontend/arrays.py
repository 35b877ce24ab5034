"""Attributes and methods of arrays and numbers."""

from __future__ import annotations

import difflib
import math
from operator import methodcaller
from typing import Any

import numpy as np

from archipel.frontend import table
from archipel.frontend.operators import multiply
from archipel.frontend.reader import Reader
from archipel.frontend.values import Tensor, content, describe, is_known, refuse

_IN_PLACE = frozenset({"byteswap", "fill", "partition", "put", "resize", "setfield", "setflags", "sort"})
_ATTRIBUTES = ("T", "dtype", "ndim", "shape", "size")


def attribute(r: Reader, x: Any, name: str) -> Any:
    """`x.name`."""
    if not isinstance(x, Tensor):
        return getattr(x, name) if name in ("real", "imag") else refuse(f"{describe(x)} has no attribute {name!r}")
    if name == "shape":
        return tuple(r.e.size(x, axis) for axis in range(x.rank))
    if name == "ndim":
        return x.rank
    if name == "dtype":
        return x.dtype
    if name == "size":
        sizes = [r.e.size(x, axis) for axis in range(x.rank)]
        known = math.prod(n for n in sizes if isinstance(n, int))
        product: Any = known
        for n in sizes:
            if not isinstance(n, int):
                product = n if product == 1 else multiply(r.e, n, product)
        return product
    if name == "T":
        return table.FUNCTIONS[np.transpose](r.e, x)
    if name in table.METHODS:
        refuse(f".{name} is a method: call it, .{name}()")
    refuse(_unknown(name, _ATTRIBUTES))


def method(r: Reader, x: Any, name: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
    """`x.name(...)`."""
    if isinstance(x, Tensor) and x.const is not None and is_known([arguments, keywords]) and name != "copy":
        if name in _IN_PLACE or "out" in keywords:
            refuse(f".{name} changes the array in place; use the function of NumPy that gives a new one")
        if not hasattr(x.const, name):
            refuse(_unknown(name, table.METHODS))
        # As a function of the array, so that a view is known for one.
        return r.known(
            methodcaller(name, *map(content, arguments), **{key: content(v) for key, v in keywords.items()}),
            [x],
            {},
            f".{name}",
        )
    if not isinstance(x, Tensor):
        return r.known(
            getattr(x, name, None) or refuse(f"{describe(x)} has no method {name!r}"), arguments, keywords, name
        )
    if name not in table.METHODS:
        refuse(_unknown(name, table.METHODS))
    return table.bound(table.METHODS[name], r.e, f".{name}", [x, *arguments], keywords)


def _unknown(name: str, among: Any) -> str:
    near = difflib.get_close_matches(name, list(among), 3)
    hint = f"; similar ones are supported: {', '.join(near)}" if near else ""
    return f".{name} of an array is not supported{hint}; see docs/python_functions.md"
