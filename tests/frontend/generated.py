"""Generated programs: nested if, for and while over whole numbers and an array, with break, continue and return."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

HEAD = "def program(a, b, x):\n    c = 0\n    x = x * 1\n"
RESULT = "return a, b, c, x"

NUMBERS = st.sampled_from(
    ["a", "b", "c", "a + b", "a - c", "2 * b - a", "c + 1", "a * b % 11", "b // 3", "c % 5 - 2", "(a if a > b else c)",
     "min(a, b)", "int(x[0]) % 7", "helper(a, c)", "7"]
)  # fmt: skip
ARRAYS = st.sampled_from(
    ["x + a", "x * 0.5", "np.maximum(x, b)", "x - x.mean()", "np.where(x > c, x, -x)", "x[::-1]", "x * x[b % 3] % 9",
     "np.roll(x, 1) + c", "double(x)"]
)  # fmt: skip
CONDITIONS = st.sampled_from(
    ["a < b", "c % 2 == 0", "a > 0 and x[a % 3] > 0.5", "not a == c", "0 < b <= 4", "x.sum() > b or c > 3", "c < 4",
     "np.any(x > 2)", "b"]
)  # fmt: skip


def _assignment() -> st.SearchStrategy[list[str]]:
    return st.one_of(
        st.tuples(st.sampled_from("abc"), NUMBERS).map(lambda t: [f"{t[0]} = ({t[1]}) % 97"]),
        st.tuples(st.sampled_from("abc"), NUMBERS).map(lambda t: [f"{t[0]} += {t[1]}", f"{t[0]} %= 89"]),
        ARRAYS.map(lambda e: [f"x = np.clip({e}, -50, 50)"]),
        ARRAYS.map(lambda e: [f"x += 0.25 * np.clip({e}, -9, 9)"]),
        st.tuples(st.sampled_from("abc"), NUMBERS).map(lambda t: [f"x[{t[0]} % 3] = {t[1]}"]),
        st.just(["a, b = b, a"]),
        st.tuples(NUMBERS, st.sampled_from("abc")).map(lambda t: [f"t = {t[0]}", f"{t[1]} = (t * t) % 83"]),
    )


def _jump(in_loop: bool) -> st.SearchStrategy[list[str]]:
    return st.sampled_from([["break"], ["continue"], [RESULT]] if in_loop else [[RESULT]])


def _indented(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines]


def _block(depth: int, in_loop: bool) -> st.SearchStrategy[list[str]]:
    statement = _assignment()
    if depth:
        inner, looped = _block(depth - 1, in_loop), _block(depth - 1, True)
        leaving = st.tuples(CONDITIONS, _jump(in_loop)).map(lambda t: [f"if {t[0]}:", *_indented(t[1])])
        choice = st.tuples(CONDITIONS, inner, st.one_of(st.none(), inner)).map(
            lambda t: [f"if {t[0]}:", *_indented(t[1]), *([] if t[2] is None else ["else:", *_indented(t[2])])]
        )
        three = st.tuples(CONDITIONS, inner, CONDITIONS, inner).map(
            lambda t: [f"if {t[0]}:", *_indented(t[1]), f"elif {t[2]}:", *_indented(t[3])]
        )
        length = st.sampled_from(["3", "a % 4", "1, b % 5", "4, 0, -2"])
        counted = st.tuples(length, looped).map(
            lambda t: [f"for i{depth} in range({t[0]}):", f"    c = (c + i{depth}) % 79", *_indented(t[1])]
        )
        over = looped.map(lambda body: ["for item in np.abs(x):", "    c = (c + int(item)) % 79", *_indented(body)])
        unrolled = looped.map(lambda body: ["for k in (1, 2):", "    b = (b * k) % 61", *_indented(body)])
        # The counter of a while is its own, so that every loop ends.
        until = st.tuples(CONDITIONS, looped).map(
            lambda t: [f"n{depth} = 0", f"while n{depth} < 3 and ({t[0]}):", f"    n{depth} += 1", *_indented(t[1])]
        )
        collected = looped.map(
            lambda body: [
                f"got{depth} = []", f"for j{depth} in range(3):", f"    got{depth}.append(x * (j{depth} + c % 3))",
                f"    last{depth} = x[j{depth}] + c", *_indented(body),
                f"x = np.clip(x + np.mean(got{depth}, axis=0) - 0.1 * last{depth}, -50, 50)",
            ]
        )  # fmt: skip
        summed = inner.map(
            lambda body: [
                "s = 0", "for v in x * 1:", *_indented(body), "    s += v * 0.5", "    if s > 9:", "        break",
                "x = x * 0.9 + s % 3",
            ]
        )  # fmt: skip
        loops = (counted, over, unrolled, until, collected, summed)
        statement = st.one_of(statement, leaving, choice, three, *loops)
    return st.lists(statement, min_size=1, max_size=3).map(lambda blocks: [line for block in blocks for line in block])


PROGRAMS = _block(3, False).map(lambda lines: HEAD + "\n".join(_indented([*lines, RESULT])) + "\n")
"""Source texts of `program(a, b, x)`."""


def double(v: Any) -> Any:
    return v + v


def helper(p: Any, q: Any) -> Any:
    for k in range(3):
        if p > q + k:
            return p - q
    return q + 1


def compiled(text: str) -> Callable[..., Any]:
    """The function of a program, whose source can be read like a file's."""
    name = f"<program {abs(hash(text))}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    space: dict[str, Any] = {"np": np, "double": double, "helper": helper}
    exec(compile(text, name, "exec"), space)
    program: Callable[..., Any] = space["program"]
    return program
