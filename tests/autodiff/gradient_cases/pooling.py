from __future__ import annotations

from typing import Any

import torch
from gradient_cases.case import Case, Draw, distinct, free_axes, normal
from gradient_cases.windows import axes
from hypothesis import strategies as st
from torch.nn import functional as F

MAXIMUM = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
MEAN = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def window(draw: Draw) -> tuple[int, list[int], dict[str, Any]]:
    """The rank, spatial sizes and attributes of a pooling operator with padding that PyTorch can have, too."""
    n = draw(st.sampled_from([2, 2, 1, 3]))
    kernel = axes(draw, n, 1, 3)
    side_by_side = draw(st.booleans())
    strides = kernel if side_by_side else axes(draw, n, 1, 3)
    if not side_by_side and draw(st.booleans()):
        strides = [1] * n
    dilations = [1] * n if side_by_side or draw(st.booleans()) else axes(draw, n, 1, 2)
    extent = [d * (k - 1) + 1 for k, d in zip(kernel, dilations)]
    # PyTorch pads both sides alike and at most by half a window.
    half = [0] * n if side_by_side else [draw(st.integers(0, k // 2)) for k in kernel]
    spatial = [e + draw(st.integers(0, 4)) for e in extent]
    attributes: dict[str, Any] = {
        "kernel_shape": kernel,
        "strides": strides,
        "dilations": dilations,
        "pads": half * 2,
        "ceil_mode": draw(st.integers(0, 1)),
    }
    return n, spatial, attributes


def late(spatial: list[int], attributes: dict[str, Any]) -> set[int]:
    """Spatial axes on which a window of ceil_mode would start behind the input: their size must be symbolic."""
    if not attributes["ceil_mode"]:
        return set()
    found = set()
    for i, (size, k, stride, d) in enumerate(
        zip(spatial, attributes["kernel_shape"], attributes["strides"], attributes["dilations"])
    ):
        pad = attributes["pads"][i]
        if -(-(size + 2 * pad - d * (k - 1) - 1) // stride) * stride >= size + pad:
            found.add(i + 2)
    return found


@st.composite
def max_pool(draw: Draw) -> Case:
    n, spatial, attributes = window(draw)
    x = distinct(draw, draw(st.integers(1, 2)), draw(st.integers(1, 3)), *spatial)
    attributes["storage_order"] = draw(st.integers(0, 1))
    free = free_axes(draw, x.shape, [0, *range(2, n + 2)]) | late(spatial, attributes)

    def function(x: torch.Tensor) -> torch.Tensor:
        return MAXIMUM[n](
            x,
            attributes["kernel_shape"],
            attributes["strides"],
            attributes["pads"][:n],
            attributes["dilations"],
            ceil_mode=bool(attributes["ceil_mode"]),
        )

    return Case("MaxPool", [x], attributes, free={0: free}, torch=function, outputs=draw(st.integers(1, 2)))


@st.composite
def average_pool(draw: Draw) -> Case:
    n, spatial, attributes = window(draw)
    x = normal(draw, draw(st.integers(1, 2)), draw(st.integers(1, 3)), *spatial)
    free = free_axes(draw, x.shape, [0, *range(2, n + 2)]) | late(spatial, attributes)
    include = attributes["count_include_pad"] = draw(st.integers(0, 1))

    def function(x: torch.Tensor) -> torch.Tensor:
        return MEAN[n](
            x,
            attributes["kernel_shape"],
            attributes["strides"],
            attributes["pads"][:n],
            ceil_mode=bool(attributes["ceil_mode"]),
            count_include_pad=bool(include),
        )

    like_torch = set(attributes["dilations"]) == {1}
    return Case("AveragePool", [x], attributes, free={0: free}, torch=function if like_torch else None)


@st.composite
def uneven(draw: Draw, op_type: str) -> Case:
    """Other padding before than after, and auto_pad: PyTorch has neither."""
    kernel = axes(draw, 2, 1, 3)
    # ONNX Runtime refuses SAME where a stride is longer than its window.
    strides = [draw(st.integers(1, min(k, 2))) for k in kernel]
    attributes: dict[str, Any] = {"kernel_shape": kernel, "strides": strides}
    mode = draw(st.sampled_from(["NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"]))
    attributes["auto_pad"] = mode
    if mode == "NOTSET":
        attributes["pads"] = [draw(st.integers(0, k - 1)) for k in kernel * 2]
    if op_type == "AveragePool":
        attributes["count_include_pad"] = draw(st.integers(0, 1))
    x = distinct(draw, 2, 2, *[k + draw(st.integers(0, 3)) for k in kernel])
    return Case(op_type, [x], attributes, free={0: free_axes(draw, x.shape, [0, 2, 3])})


@st.composite
def whole(draw: Draw, op_type: str) -> Case:
    n = draw(st.integers(1, 3))
    x = distinct(draw, draw(st.integers(1, 2)), draw(st.integers(1, 3)), *axes(draw, n, 1, 4))

    def function(x: torch.Tensor) -> torch.Tensor:
        over = tuple(range(2, n + 2))
        return x.amax(over, keepdim=True) if op_type == "GlobalMaxPool" else x.mean(over, keepdim=True)

    return Case(op_type, [x], free={0: free_axes(draw, x.shape)}, torch=function)


CASES = {
    ("", "MaxPool"): st.one_of(max_pool(), max_pool(), uneven("MaxPool")),
    ("", "AveragePool"): st.one_of(average_pool(), average_pool(), uneven("AveragePool")),
    ("", "GlobalAveragePool"): whole("GlobalAveragePool"),
    ("", "GlobalMaxPool"): whole("GlobalMaxPool"),
}
