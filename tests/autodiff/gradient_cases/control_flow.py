from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gradient_cases.case import Case, Draw, free_axes, normal
from hypothesis import strategies as st


@st.composite
def if_case(draw: Draw) -> Case:
    """Two results; the branches capture a product's factors, and differ in which."""
    rows, width = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    then = "t () => (T[n, m] a, T[n, m] b) { p = MatMul (x1, x2) a = Tanh (p) b = Mul (a, x1) }"
    otherwise = "e () => (T[n, m] c, T[n, m] d) { c = Sin (x1) d = Identity (x1) }"

    def function(c: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b = (torch.tanh(x @ w), torch.tanh(x @ w) * x) if bool(c) else (torch.sin(x), x + 0 * w.sum())
        return tuple([a + 0 * w.sum(), b][i] for i in of)

    of = draw(st.sampled_from([(0,), (1,), (0, 1)]))
    return Case(
        "If",
        [np.array(draw(st.booleans())), normal(draw, rows, width), normal(draw, width, width)],
        free={1: free_axes(draw, (rows, width), [0])},
        torch=function,
        outputs=2,
        of=of,
        bodies={"then_branch": then, "else_branch": otherwise},
        captured=frozenset({1, 2}),
        declared=[["r", width], ["r", width]],
    )


@st.composite
def scan_case(draw: Draw) -> Case:
    """Two states, two sequences along any axis in any direction, two stacked results, a captured matrix."""
    steps, rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    axes = [draw(st.integers(-2, 2)), draw(st.integers(-1, 1))]
    out_axes = [draw(st.integers(-3, 2)), draw(st.integers(0, 1))]
    back, out_back = [[draw(st.integers(0, 1)) for _ in range(2)] for _ in range(2)]
    body = """b (T[n, m] h, T[n] c, T[n, m] u, T[n] v) => (T[n, m] h2, T[n] c2, T[n, m] y, T[n] z) {
        p = MatMul (h, x4)
        q = Add (p, u)
        h2 = Tanh (q)
        s = ReduceMax <keepdims = 0> (h2)
        c2 = Mul (c, v)
        y = Mul (h2, u)
        t = Sin (c)
        z = Mul (t, s)
    }"""

    def function(
        h: torch.Tensor, c: torch.Tensor, x: torch.Tensor, v: torch.Tensor, w: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ys, zs, first = [], [], (h, c)
        for t in range(steps):
            u, f = (a.select(axis, steps - 1 - t if b else t) for a, axis, b in zip((x, v), axes, back))
            h, before = torch.tanh(h @ w + u), c
            c = c * f
            ys.append(h * u)
            zs.append(torch.sin(before) * h.max())
        stacked = [torch.stack(r[:: -1 if b else 1], axis) for r, axis, b in zip((ys, zs), out_axes, out_back)]
        nothing = 0 * sum(a.sum() for a in (x, v, w, first[0], first[1]))
        return tuple([h, c, *stacked][i] + nothing for i in of)

    def placed(shape: list[int], axis: int) -> list[int]:
        shape.insert(axis if axis >= 0 else axis + len(shape) + 1, steps)
        return shape

    of = tuple(sorted(draw(st.sets(st.integers(0, 3), min_size=1))))
    attributes: dict[str, Any] = {"num_scan_inputs": 2}
    for name, numbers in (
        ("scan_input_axes", axes),
        ("scan_input_directions", back),
        ("scan_output_axes", out_axes),
        ("scan_output_directions", out_back),
    ):
        if any(numbers):
            attributes[name] = numbers
    return Case(
        "Scan",
        [
            normal(draw, rows, width),
            normal(draw, rows),
            normal(draw, *placed([rows, width], axes[0])),
            normal(draw, *placed([rows], axes[1])),
            normal(draw, width, width),
        ],
        attributes,
        free={0: free_axes(draw, (rows, width), [0])},
        torch=function,
        outputs=4,
        of=of,
        bodies={"body": body},
        captured=frozenset({4}),
        declared=[[rows, width], [rows], placed([rows, width], out_axes[0]), placed([rows], out_axes[1])],
    )


@st.composite
def loop_case(draw: Draw) -> Case:
    """A limit, a condition, both or one; a state, a stacked result, captured: a matrix, a bias, when to stop."""
    rows, width = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    form = draw(st.sampled_from(["both", "limit", "condition", "never"]))
    limit, stop = draw(st.integers(0, 4)), draw(st.integers(0, 5))
    runs = {"both": min(limit, stop + 1), "limit": limit, "condition": stop + 1, "never": 0}[form]
    condition = None if form == "limit" else np.array(form != "never")
    goes_on = "Identity (c)" if form == "limit" else "Less (i, x5)"
    body = f"""b (int64 i, bool c, T[n, m] h) => (bool c2, T[n, m] h2, T[{rows}, {width}] y) {{
        c2 = {goes_on}
        p = MatMul (h, x3)
        q = Add (p, x4)
        h2 = Tanh (q)
        y = Mul (h, h2)
    }}"""

    def function(
        m: torch.Tensor | None,
        c: torch.Tensor | None,
        h: torch.Tensor,
        w: torch.Tensor,
        b: torch.Tensor,
        last: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ys = []
        nothing = 0 * (w.sum() + b.sum() + h.sum())
        for _ in range(runs):
            before, h = h, torch.tanh(h @ w + b)
            ys.append(before * h)
        y = torch.stack(ys) if ys else torch.zeros(0, rows, width, dtype=h.dtype)
        return tuple([h, y][i] + nothing for i in of)

    of = draw(st.sampled_from([(0,), (1,), (0, 1)]))
    return Case(
        "Loop",
        [
            None if form == "condition" else np.array(limit),
            condition,
            normal(draw, rows, width),
            normal(draw, width, width),
            normal(draw, width),
            np.array(stop),
        ],
        torch=function,
        outputs=2,
        of=of,
        bodies={"body": body},
        captured=frozenset({3, 4, 5}),
        declared=[[rows, width], ["runs", rows, width]],
    )


STRATEGIES: dict[str, Callable[[], st.SearchStrategy[Case]]] = {"If": if_case, "Scan": scan_case, "Loop": loop_case}
CASES = {("", op_type): strategy() for op_type, strategy in STRATEGIES.items()}
