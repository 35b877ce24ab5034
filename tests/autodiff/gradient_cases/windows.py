from __future__ import annotations

from typing import Any

import torch
from gradient_cases.case import Case, Draw, free_axes, normal
from gradient_cases.reference import CONV, TRANSPOSED, around, transposed_padding
from hypothesis import strategies as st
from torch.nn import functional as F


def axes(draw: Draw, n: int, low: int, high: int) -> list[int]:
    return [draw(st.integers(low, high)) for _ in range(n)]


def same(mode: str, spatial: list[int], strides: list[int], extent: list[int]) -> tuple[list[int], list[int]]:
    """Padding before and after of auto_pad=SAME_*."""
    totals = [max((-(-s // t) - 1) * t + e - s, 0) for s, t, e in zip(spatial, strides, extent)]
    small = [t // 2 for t in totals]
    large = [t - h for t, h in zip(totals, small)]
    return (small, large) if mode == "SAME_UPPER" else (large, small)


@st.composite
def conv(draw: Draw) -> Case:
    n = draw(st.sampled_from([2, 2, 1, 3]))
    group = draw(st.sampled_from([1, 1, 2, 3]))
    kernel, strides, dilations = axes(draw, n, 1, 3), axes(draw, n, 1, 2), axes(draw, n, 1, 2)
    # Many rows in a window, depthwise, and columns longer than rows are computed differently.
    per_group, multiple = draw(st.sampled_from([1, 1, 2, 8])), draw(st.sampled_from([1, 1, 2]))
    if draw(st.booleans()):
        strides = [1] * n
    mode = draw(st.sampled_from(["NOTSET", "NOTSET", "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"]))
    if mode.startswith("SAME"):
        dilations = [1] * n
    extent = [d * (k - 1) + 1 for k, d in zip(kernel, dilations)]
    pads = axes(draw, 2 * n, 0, 3) if mode == "NOTSET" else [0] * (2 * n)
    spatial = [e + draw(st.integers(0, 3)) for e in extent]
    if draw(st.booleans()):
        spatial[0] += 8
    x = normal(draw, draw(st.integers(1, 2)), group * per_group, *spatial)
    inputs = [x, normal(draw, group * multiple, per_group, *kernel)]
    if draw(st.booleans()):
        inputs.append(normal(draw, group * multiple))
    attributes = {"strides": strides, "dilations": dilations, "group": group, "auto_pad": mode}
    if mode == "NOTSET":
        attributes["pads"] = pads
    if draw(st.booleans()):
        attributes["kernel_shape"] = kernel
    free = free_axes(draw, x.shape, [0, *range(2, n + 2)])

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        before, after = pads[:n], pads[n:]
        if mode.startswith("SAME"):
            before, after = same(mode, spatial, strides, extent)
        return CONV[n](F.pad(x, around(before, after)), w, b, stride=strides, dilation=dilations, groups=group)

    return Case("Conv", inputs, attributes, free={0: free}, torch=function)


@st.composite
def conv_transpose(draw: Draw) -> Case:
    n = draw(st.sampled_from([2, 2, 1, 3]))
    group = draw(st.sampled_from([1, 1, 2, 3]))
    per_group, multiple = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    kernel, strides, dilations = axes(draw, n, 1, 3), axes(draw, n, 1, 3), axes(draw, n, 1, 2)
    spatial = axes(draw, n, 1, 4)
    x = normal(draw, draw(st.integers(1, 2)), group * per_group, *spatial)
    inputs = [x, normal(draw, group * per_group, multiple, *kernel)]
    if draw(st.booleans()):
        inputs.append(normal(draw, group * multiple))
    attributes: dict[str, Any] = {"strides": strides, "dilations": dilations, "group": group}
    if draw(st.booleans()):
        attributes["kernel_shape"] = kernel
    # ONNX: output_padding is less than the stride or the dilation.
    if draw(st.booleans()):
        attributes["output_padding"] = [draw(st.integers(0, s - 1)) for s in strides]
    reached = [s * (z - 1) + d * (k - 1) + 1 for s, z, d, k in zip(strides, spatial, dilations, kernel)]
    among = [0, *range(2, n + 2)]
    form = draw(st.sampled_from(["pads", "pads", "output_shape", "VALID", "SAME_UPPER", "SAME_LOWER"]))
    if form == "pads":
        before = [draw(st.integers(0, min(2, r - 1))) for r in reached]
        attributes["pads"] = before + [draw(st.integers(0, min(2, r - 1 - b))) for r, b in zip(reached, before)]
    elif form == "output_shape":
        attributes["output_shape"] = [draw(st.integers(max(z, r - 3), r)) for z, r in zip(spatial, reached)]
        attributes["auto_pad"] = draw(st.sampled_from(["NOTSET", "SAME_UPPER", "SAME_LOWER"]))
        among = [0]
    else:
        attributes["auto_pad"] = form
        if form.startswith("SAME"):
            # Where a window is shorter than its stride, runtimes and ONNX's inference disagree on the output's size.
            longest = [d * (k - 1) + 1 for d, k in zip(dilations, kernel)]
            attributes["strides"] = strides = [min(s, e) for s, e in zip(strides, longest)]
            attributes.pop("output_padding", None)
    before, after = transposed_padding(spatial, kernel, attributes)

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        full = TRANSPOSED[n](x, w, stride=strides, dilation=dilations, groups=group)
        y = F.pad(full, around([-p for p in before], [-p for p in after]))
        return y if b is None else y + b.reshape(-1, *[1] * n)

    return Case("ConvTranspose", inputs, attributes, free={0: free_axes(draw, x.shape, among)}, torch=function)


CASES = {("", "Conv"): conv(), ("", "ConvTranspose"): conv_transpose()}
