from __future__ import annotations

import numpy as np
import torch
from gradient_cases.case import Case, Draw, free_axes, normal, shapes
from hypothesis import strategies as st
from torch.nn import functional as F


@st.composite
def tile(draw: Draw) -> Case:
    shape = draw(shapes(1, 3))
    repeats = [draw(st.sampled_from([1, 1, 2, 3, 0])) for _ in shape]
    return Case(
        "Tile",
        [normal(draw, *shape), np.array(repeats, np.int64)],
        constants=frozenset(draw(st.sampled_from([[1], []]))),
        free={0: free_axes(draw, shape)},
        torch=lambda x, _: x.repeat(repeats),
        rank=len(shape),
    )


def crd(x: torch.Tensor, block: int) -> torch.Tensor:
    return F.pixel_shuffle(x, block)


def dcr(x: torch.Tensor, block: int) -> torch.Tensor:
    n, channels, height, width = x.shape
    apart = x.reshape(n, block, block, channels // block**2, height, width).permute(0, 3, 4, 1, 5, 2)
    return apart.reshape(n, -1, height * block, width * block)


@st.composite
def depth_to_space(draw: Draw) -> Case:
    block, mode = draw(st.integers(1, 3)), draw(st.sampled_from([None, "DCR", "CRD"]))
    shape = [
        draw(st.integers(1, 2)),
        block**2 * draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
    ]
    return Case(
        "DepthToSpace",
        [normal(draw, *shape)],
        {"blocksize": block} | ({} if mode is None else {"mode": mode}),
        free={0: free_axes(draw, shape)},
        torch=lambda x: crd(x, block) if mode == "CRD" else dcr(x, block),
    )


@st.composite
def space_to_depth(draw: Draw) -> Case:
    block = draw(st.integers(1, 3))
    shape = [draw(st.integers(1, 2)), draw(st.integers(1, 3)), *(block * draw(st.integers(1, 2)) for _ in range(2))]

    def function(x: torch.Tensor) -> torch.Tensor:
        n, channels, height, width = x.shape
        apart = x.reshape(n, channels, height // block, block, width // block, block).permute(0, 3, 5, 1, 2, 4)
        return apart.reshape(n, -1, height // block, width // block)

    return Case(
        "SpaceToDepth",
        [normal(draw, *shape)],
        {"blocksize": block},
        free={0: free_axes(draw, shape)},
        torch=function,
    )


@st.composite
def trilu(draw: Draw) -> Case:
    shape = draw(shapes(2, 4, 4))
    upper, k = draw(st.sampled_from([None, 0, 1])), draw(st.sampled_from([None, -5, -2, -1, 0, 1, 2, 5]))
    inputs: list[np.ndarray | None] = [normal(draw, *shape)]
    if k is not None or draw(st.booleans()):
        inputs.append(k if k is None else np.array(k, np.int64))

    def function(x: torch.Tensor, _: object = None) -> torch.Tensor:
        return torch.tril(x, k or 0) if upper == 0 else torch.triu(x, k or 0)

    return Case(
        "Trilu",
        inputs,
        {} if upper is None else {"upper": upper},
        constants=frozenset({1}) if k is not None and draw(st.booleans()) else frozenset(),
        free={0: free_axes(draw, shape)},
        torch=function,
    )


@st.composite
def cum_sum(draw: Draw) -> Case:
    shape = draw(shapes(1, 3, 4))
    axis = draw(st.integers(0, len(shape) - 1))
    flags = [draw(st.sampled_from([None, 0, 1])) for _ in range(2)]
    attributes = {name: flag for name, flag in zip(("exclusive", "reverse"), flags) if flag is not None}
    given = np.array(axis - len(shape) * draw(st.booleans()), draw(st.sampled_from([np.int64, np.int32])))

    def function(x: torch.Tensor, _: object) -> torch.Tensor:
        x = x.flip(axis) if flags[1] else x
        total = x.cumsum(axis) - (x if flags[0] else 0)
        return total.flip(axis) if flags[1] else total

    return Case(
        "CumSum",
        [normal(draw, *shape), given],
        attributes,
        constants=frozenset({1}) if draw(st.booleans()) else frozenset(),
        free={0: free_axes(draw, shape)},
        torch=function,
    )


CASES = {
    ("", "Tile"): tile(),
    ("", "DepthToSpace"): depth_to_space(),
    ("", "SpaceToDepth"): space_to_depth(),
    ("", "Trilu"): trilu(),
    ("", "CumSum"): cum_sum(),
}
