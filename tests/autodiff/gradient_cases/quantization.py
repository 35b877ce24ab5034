from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import torch
from gradient_cases.case import Array, Case, Draw, free_axes, shapes
from hypothesis import strategies as st
from onnx import helper

KINDS = [np.int8, np.uint8, np.int16, np.uint16, ml_dtypes.int4, ml_dtypes.uint4]


@dataclass(repr=False)
class Quantized(Case):
    """QuantizeLinear, then DequantizeLinear; `inputs`: x, scale, zero point or None, and the second one's own scale."""

    def model(self, dtype: npt.DTypeLike) -> onnx.ModelProto:
        proto = super().model(dtype)
        first = proto.graph.node[0]
        names = list(first.input)
        del first.input[2 + (names[2] != "") :]
        first.output[:] = ["q"]
        second = ["q", names[3] or names[1], names[2]]
        given = {name: value for name, value in self.attributes.items() if name != "output_dtype"}
        proto.graph.node.append(helper.make_node("DequantizeLinear", second, ["y"], name="back", **given))
        return proto


@dataclass(frozen=True)
class Grid:
    """How scales lie over a tensor: one for all, one per position of an axis, or one per block along it."""

    shape: list[int]  # of a scale
    attributes: dict[str, int]
    tensor: list[int]

    def spread(self, value: torch.Tensor) -> torch.Tensor:
        n, axis, block = len(self.tensor), self.attributes.get("axis", 1), self.attributes.get("block_size", 0)
        if block:
            return value.repeat_interleave(block, axis).narrow(axis, 0, self.tensor[axis])
        return value if value.numel() == 1 else value.reshape([-1 if i == axis % n else 1 for i in range(n)])


def draw_grid(draw: Draw) -> Grid:
    shape = draw(shapes())
    n = len(shape)
    way = draw(st.sampled_from(["tensor", "axis", "block"])) if n else "tensor"
    if way == "tensor":
        return Grid(draw(st.sampled_from([[], [1]])) if n else [], {}, shape)
    shape = [size * draw(st.integers(1, 2)) for size in shape] if n > 1 else [shape[0] + 1]
    axis = draw(st.integers(-n, n - 1))
    if way == "axis":
        named = {} if axis == 1 and draw(st.booleans()) else {"axis": axis}
        return Grid([shape[axis]], named, shape)
    # ONNX Runtime takes a scale of shape [1] for one per tensor, which has no blocks.
    block = draw(st.integers(1, shape[axis] if n > 1 else max(shape[axis] - 1, 1)))
    blocks = list(shape)
    blocks[axis] = -(-shape[axis] // block)
    return Grid(blocks, {"axis": axis, "block_size": block}, shape)


def draw_scale(rng: np.random.Generator, shape: list[int], bits: int) -> Array:
    """Exact in float32; powers of two where the ratio of two numbers in float32 is too coarse for 16 bits."""
    scale = 2.0 ** rng.integers(-4, 2, shape) if bits == 16 else 0.05 + rng.random(shape)
    return np.asarray(scale, np.float32).astype(np.float64)


@st.composite
def quantize(draw: Draw) -> Case:
    kind = np.dtype(draw(st.sampled_from(KINDS)))
    limits = ml_dtypes.iinfo(kind)
    low, high = int(limits.min), int(limits.max)
    grid = draw_grid(draw)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = draw_scale(rng, grid.shape, limits.bits)
    zero = rng.integers(low, high, grid.shape, endpoint=True) if draw(st.booleans()) else None
    offset = 0 if zero is None else grid.spread(torch.from_numpy(np.asarray(zero))).numpy()
    # Inside, on the last steps, and beyond; never near where rounding goes the other way.
    span = (high - low) // 4
    steps = rng.integers(low - span, high + span, grid.tensor)
    steps = np.where(rng.random(grid.tensor) < 0.3, rng.choice([low, high], grid.tensor), steps)
    ratio = steps - offset + rng.uniform(-0.4, 0.4, grid.tensor)
    x = (ratio * grid.spread(torch.from_numpy(scale)).numpy()).astype(np.float32)
    attributes = dict(grid.attributes)
    if zero is None and not (kind == np.uint8 and draw(st.booleans())):
        attributes["output_dtype"] = helper.np_dtype_to_tensor_dtype(kind)
    other = draw_scale(rng, grid.shape, limits.bits) if draw(st.booleans()) else None
    # ONNX Runtime takes no four-bit arrays from Python.
    constants = {2} if zero is not None and (limits.bits == 4 or draw(st.booleans())) else set()
    if limits.bits == 16:
        # The scale's gradient is a difference of numbers near 2^15, whose rounding in float32 is most of what is left.
        constants |= {1} if other is None else {1, 3}

    def function(
        x: torch.Tensor, s: torch.Tensor, z: torch.Tensor | None = None, t: torch.Tensor | None = None
    ) -> torch.Tensor:
        zero = 0 if z is None else grid.spread(z).double()
        ratio = x / grid.spread(s)
        rounded = ratio + (torch.round(ratio) - ratio).detach()
        return (torch.clamp(rounded + zero, low, high) - zero) * grid.spread(s if t is None else t)

    return Quantized(
        "QuantizeLinear",
        [np.asarray(x, np.float64), scale, None if zero is None else np.asarray(zero).astype(kind), other],
        attributes,
        constants=frozenset(constants),
        free={0: free_axes(draw, grid.tensor)},
        torch=function,
        single=True,
    )


@st.composite
def dequantize(draw: Draw) -> Case:
    kind = np.dtype(draw(st.sampled_from([*KINDS, np.int32])))
    low, high = (-1000, 1000) if kind == np.int32 else (int(ml_dtypes.iinfo(kind).min), int(ml_dtypes.iinfo(kind).max))
    grid = draw_grid(draw)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    inputs = [
        rng.integers(low, high, grid.tensor, endpoint=True).astype(kind),
        draw_scale(rng, grid.shape, 8),
    ]
    if kind != np.int32 and draw(st.booleans()):
        inputs.append(rng.integers(low, high, grid.shape, endpoint=True).astype(kind))

    def function(q: torch.Tensor, s: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        return (q.double() - (0 if z is None else grid.spread(z).double())) * grid.spread(s)

    return Case(
        "DequantizeLinear",
        [np.asarray(value) for value in inputs],
        dict(grid.attributes),
        constants=frozenset({0, 2} & set(range(len(inputs))) if kind.kind == "V" or draw(st.booleans()) else ()),
        free={0: free_axes(draw, grid.tensor)},
        torch=function,
        single=True,
    )


@dataclass(repr=False)
class Dynamic(Case):
    """DynamicQuantizeLinear, then a DequantizeLinear with what it found."""

    def model(self, dtype: npt.DTypeLike) -> onnx.ModelProto:
        proto = super().model(dtype)
        proto.graph.node[0].output[:] = ["q", "s", "z"]
        proto.graph.node.append(helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], name="back"))
        return proto


@st.composite
def dynamic(draw: Draw) -> Case:
    shape = draw(shapes(1))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale, zero = 2.0 ** rng.integers(-4, 2), int(rng.integers(0, 256))
    # Never near where rounding goes the other way, and the ends are exactly those of the integers.
    steps = rng.integers(-zero, 256 - zero, shape) + rng.uniform(-0.4, 0.4, shape)
    steps = np.clip(steps, -zero, 255 - zero)
    ends = [-zero, 255 - zero]
    steps.flat[: len(ends)] = ends[: steps.size]

    def function(x: torch.Tensor) -> torch.Tensor:
        low, high = x.detach().min().clamp(max=0), x.detach().max().clamp(min=0)
        step = (high - low) / 255 if high > low else torch.tensor(1.0, dtype=x.dtype)
        shift = torch.round(-low / step)
        rounded = (torch.clamp(torch.round(x / step) + shift, 0, 255) - shift) * step
        return x + (rounded - x).detach()

    return Dynamic(
        "DynamicQuantizeLinear",
        [np.asarray(steps * scale, np.float32).astype(np.float64)],
        {},
        free={0: free_axes(draw, shape)},
        torch=function,
        single=True,
    )


CASES = {
    ("", "QuantizeLinear"): quantize(),
    ("", "DequantizeLinear"): dequantize(),
    ("", "DynamicQuantizeLinear"): dynamic(),
}
