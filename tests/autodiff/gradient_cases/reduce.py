from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from gradient_cases.case import (
    Array,
    Case,
    Draw,
    away_from_zero,
    distinct,
    free_axes,
    normal,
    positive,
    shapes,
)
from hypothesis import strategies as st


@st.composite
def reduction(
    draw: Draw,
    op_type: str,
    function: Callable[..., torch.Tensor],
    values: Callable[..., Array] = normal,
    computed_axes: bool = True,
) -> Case:
    shape = draw(shapes(0, 3))
    n = len(shape)
    x = values(draw, *shape)
    keep = draw(st.integers(0, 1))
    free = {0: free_axes(draw, shape)}
    axes = draw(st.lists(st.integers(0, n - 1), unique=True)) if n else []
    attributes = {"keepdims": keep}
    inputs: list[Array | None] = [x]
    constants: frozenset[int] = frozenset()
    if axes:
        inputs.append(np.array([axis - n * draw(st.booleans()) for axis in axes], np.int64))
        # Axes computed at run time are possible where the reduced ones stay.
        constants = frozenset({1}) if not (keep and computed_axes) or draw(st.booleans()) else frozenset()
        attributes["noop_with_empty_axes"] = draw(st.integers(0, 1))
    else:
        empty = draw(st.booleans())
        inputs += [np.array([], np.int64)] if empty else draw(st.sampled_from([[], [None]]))
        constants = frozenset({1}) if empty else frozenset()
        if draw(st.booleans()):
            attributes["noop_with_empty_axes"] = 1
        else:
            axes = list(range(n))
    # A leading axis of size 1, as PyTorch takes no axes for all of them.
    over = [0, *(axis + 1 for axis in axes)]

    def lifted(x: torch.Tensor, *_: object) -> torch.Tensor:
        y = function(x.unsqueeze(0), dim=over, keepdim=bool(keep))
        return y.squeeze(0) if keep else y

    rank = n if keep and len(inputs) > 1 and 1 not in constants else None
    return Case(op_type, inputs, attributes, constants=constants, free=free, rank=rank, torch=lifted)


def some_zeros(draw: Draw, *shape: int) -> Array:
    x = away_from_zero(draw, *shape)
    return np.asarray(np.where(np.abs(x) < draw(st.sampled_from([0.0, 0.5, 0.9])), 0.0, x))


def product(x: torch.Tensor, dim: list[int], keepdim: bool) -> torch.Tensor:
    for axis in sorted(dim, reverse=True):
        x = x.prod(axis, keepdim=keepdim)
    return x


CASES = {
    ("", "ReduceProd"): reduction("ReduceProd", product, some_zeros, computed_axes=False),
    ("", "ReduceSum"): reduction("ReduceSum", torch.sum),
    ("", "ReduceMean"): reduction("ReduceMean", torch.mean),
    ("", "ReduceMax"): reduction("ReduceMax", torch.amax, distinct),
    ("", "ReduceMin"): reduction("ReduceMin", torch.amin, distinct),
    ("", "ReduceL1"): reduction("ReduceL1", lambda x, **over: x.abs().sum(**over), away_from_zero),
    ("", "ReduceL2"): reduction("ReduceL2", lambda x, **over: (x * x).sum(**over).sqrt(), away_from_zero),
    ("", "ReduceSumSquare"): reduction("ReduceSumSquare", lambda x, **over: (x * x).sum(**over)),
    ("", "ReduceLogSum"): reduction("ReduceLogSum", lambda x, **over: x.sum(**over).log(), positive),
    ("", "ReduceLogSumExp"): reduction("ReduceLogSumExp", torch.logsumexp),
}
