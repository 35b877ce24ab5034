from __future__ import annotations

import torch
from gradient_cases.case import Case, Draw, distinct, free_axes, normal
from hypothesis import strategies as st
from torch.nn import functional as F

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
POOL = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


def _axes(draw: Draw, n: int, low: int, high: int) -> list[int]:
    return [draw(st.integers(low, high)) for _ in range(n)]


@st.composite
def conv(draw: Draw) -> Case:
    n = draw(st.sampled_from([2, 2, 1, 3]))
    group = draw(st.sampled_from([1, 1, 2, 3]))
    per_group, multiple = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    kernel, strides, dilations = _axes(draw, n, 1, 3), _axes(draw, n, 1, 2), _axes(draw, n, 1, 2)
    mode = draw(st.sampled_from(["NOTSET", "NOTSET", "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"]))
    if mode.startswith("SAME"):
        dilations = [1] * n
    extent = [d * (k - 1) + 1 for k, d in zip(kernel, dilations)]
    pads = _axes(draw, 2 * n, 0, 3) if mode == "NOTSET" else [0] * (2 * n)
    spatial = [e + draw(st.integers(0, 3)) for e in extent]
    x = normal(draw, draw(st.integers(1, 2)), group * per_group, *spatial)
    inputs = [x, normal(draw, group * multiple, per_group, *kernel)]
    if draw(st.booleans()):
        inputs.append(normal(draw, group * multiple))
    attributes = {"strides": strides, "dilations": dilations, "group": group, "auto_pad": mode}
    if mode == "NOTSET":
        attributes["pads"] = pads
    if draw(st.booleans()):
        attributes["kernel_shape"] = kernel
    fixed = mode.startswith("SAME") and max(strides) > 1
    free = free_axes(draw, x.shape, [0] if fixed else [0, *range(2, n + 2)])

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        lead = list(pads)
        if mode.startswith("SAME"):
            totals = [max((-(-s // t) - 1) * t + e - s, 0) for s, t, e in zip(spatial, strides, extent)]
            halves = [t // 2 for t in totals]
            rest = [t - h for t, h in zip(totals, halves)]
            lead = halves + rest if mode == "SAME_UPPER" else rest + halves
        padding = [p for axis in reversed(range(n)) for p in (lead[axis], lead[axis + n])]
        return CONV[n](F.pad(x, padding), w, b, stride=strides, dilation=dilations, groups=group)

    return Case("Conv", inputs, attributes, free={0: free}, torch=function)


@st.composite
def max_pool(draw: Draw) -> Case:
    n = draw(st.sampled_from([2, 2, 1, 3]))
    kernel = _axes(draw, n, 1, 3)
    side_by_side = draw(st.booleans())
    strides = kernel if side_by_side else _axes(draw, n, 1, 3)
    dilations = [1] * n if side_by_side else _axes(draw, n, 1, 2)
    extent = [d * (k - 1) + 1 for k, d in zip(kernel, dilations)]
    # PyTorch pads both sides alike and at most by half a window.
    half = [0] * n if side_by_side else [draw(st.integers(0, k // 2)) for k in kernel]
    spatial = [e + draw(st.integers(0, 4)) for e in extent]
    starts = [-(-(s + 2 * h - e) // t) * t for s, h, e, t in zip(spatial, half, extent, strides)]
    # A window that would start behind the input is refused.
    inside = all(start < s + h for start, s, h in zip(starts, spatial, half))
    ceil = draw(st.booleans()) and inside
    x = distinct(draw, draw(st.integers(1, 2)), draw(st.integers(1, 3)), *spatial)
    attributes = {
        "kernel_shape": kernel,
        "strides": strides,
        "dilations": dilations,
        "pads": half * 2,
        "ceil_mode": int(ceil),
    }
    free = free_axes(draw, x.shape, [0] if ceil else [0, *range(2, n + 2)])

    def function(x: torch.Tensor) -> torch.Tensor:
        return POOL[n](x, kernel, strides, half, dilations, ceil_mode=ceil)

    return Case("MaxPool", [x], attributes, free={0: free}, torch=function, outputs=draw(st.integers(1, 2)))


@st.composite
def max_pool_auto(draw: Draw) -> Case:
    mode = draw(st.sampled_from(["VALID", "SAME_UPPER", "SAME_LOWER"]))
    kernel = _axes(draw, 2, 1, 3)
    # ONNX Runtime refuses SAME where a stride is longer than its window.
    strides = [draw(st.integers(1, min(k, 2))) for k in kernel]
    x = distinct(draw, 2, 2, *[k + draw(st.integers(0, 3)) for k in kernel])
    return Case("MaxPool", [x], {"kernel_shape": kernel, "strides": strides, "auto_pad": mode})


CASES = {("", "Conv"): conv(), ("", "MaxPool"): st.one_of(max_pool(), max_pool(), max_pool_auto())}
