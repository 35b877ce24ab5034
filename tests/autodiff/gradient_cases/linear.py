from __future__ import annotations

import torch
from gradient_cases.case import Case, Draw, free_axes, normal
from hypothesis import strategies as st

SIZES = st.integers(1, 4)


@st.composite
def matmul(draw: Draw) -> Case:
    m, k, n = draw(SIZES), draw(SIZES), draw(SIZES)
    batch = draw(st.lists(st.integers(1, 3), max_size=2))
    leads = [[draw(st.sampled_from([d, 1])) for d in batch][draw(st.integers(0, len(batch))) :] for _ in range(2)]
    left = draw(st.sampled_from([[*leads[0], m, k], [k]]))
    right = draw(st.sampled_from([[*leads[1], k, n], [k], [k, n]]))
    return Case(
        "MatMul",
        [normal(draw, *left), normal(draw, *right)],
        free={0: free_axes(draw, left), 1: free_axes(draw, right)},
        torch=torch.matmul,
    )


@st.composite
def gemm(draw: Draw) -> Case:
    m, k, n = draw(SIZES), draw(SIZES), draw(SIZES)
    trans_a, trans_b = draw(st.integers(0, 1)), draw(st.integers(0, 1))
    alpha, beta = draw(st.sampled_from([1.0, 0.5, -2.0])), draw(st.sampled_from([1.0, 0.25, -1.5]))
    a, b = ([k, m] if trans_a else [m, k]), ([n, k] if trans_b else [k, n])
    inputs = [normal(draw, *a), normal(draw, *b)]
    c = draw(st.sampled_from([None, [n], [1, n], [m, 1], [m, n], [1], []]))
    if c is not None:
        inputs.append(normal(draw, *c))

    def function(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None) -> torch.Tensor:
        product = alpha * (a.T if trans_a else a) @ (b.T if trans_b else b)
        return product if c is None else product + beta * c

    return Case(
        "Gemm",
        inputs,
        {"alpha": alpha, "beta": beta, "transA": trans_a, "transB": trans_b},
        free={0: free_axes(draw, a), 1: free_axes(draw, b)},
        torch=function,
    )


CASES = {("", "MatMul"): matmul(), ("", "Gemm"): gemm()}
