"""Arrays for the programs, and the table of programs that files beside this one fill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

RNG = np.random.default_rng(0)
M = RNG.standard_normal((4, 3)).astype(np.float32)
D = RNG.standard_normal((4, 3))
V = RNG.standard_normal(3).astype(np.float32)
N = np.array([[7, -3, 2], [0, 5, -9], [4, 4, -1], [-6, 8, 3]])
I32 = N.astype(np.int32)
B = N > 0
C = RNG.standard_normal((2, 3, 4)).astype(np.float32)
W1 = RNG.standard_normal((3, 5)).astype(np.float32)
B1 = RNG.standard_normal(5).astype(np.float32)
PARAMS = {"fc": {"weight": W1, "bias": B1}, "scale": np.float32(2.0)}
SHIFTS = (1, 2, 3)


class Case(NamedTuple):
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    others: tuple[tuple[Any, ...], ...] = ()
    """Further arguments of the same types and shapes, which take other ways through the function."""


CASES: list[Case] = []


def case(*arguments: Any, others: tuple[tuple[Any, ...], ...] = ()) -> Callable[[Any], Any]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        CASES.append(Case(function, arguments, others))
        return function

    return add
