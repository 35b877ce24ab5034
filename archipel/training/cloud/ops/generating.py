"""Operators that make tensors: identities, windows, random numbers."""

from __future__ import annotations

import math
from typing import Any

import torch

from archipel.training.cloud.ops.context import NodeContext
from archipel.training.cloud.ops.table import lowering
from archipel.training.cloud.ops.types import torch_dtype


@lowering("EyeLike")
def eye_like(ctx: NodeContext) -> torch.Tensor:
    sizes = (ctx.size(0, 0), ctx.size(0, 1))
    return ctx.call(_eye, *sizes, ctx.integer("k", 0), torch_dtype(ctx.output_type()), ctx.device)  # type: ignore[no-any-return]


def _eye(rows: int, columns: int, offset: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    down, along = torch.arange(rows, device=device), torch.arange(columns, device=device)
    return (down[:, None] + offset == along).to(dtype)


@lowering("Bernoulli")
def bernoulli(ctx: NodeContext) -> torch.Tensor:
    # Random numbers are of PyTorch's generator, whatever the attribute `seed` says.
    return torch.bernoulli(ctx.tensor(0)).to(torch_dtype(ctx.output_type()))


# Coefficients of the cosines of a whole turn and of two (ONNX HannWindow-17 and its like).
_WINDOWS = {
    "HannWindow": (0.5, 0.5, 0.0),
    "HammingWindow": (25 / 46, 21 / 46, 0.0),
    "BlackmanWindow": (0.42, 0.5, 0.08),
}


@lowering(*_WINDOWS)
def window(ctx: NodeContext) -> torch.Tensor:
    (size,) = ctx.sizes(0)
    periodic, dtype = bool(ctx.integer("periodic", 1)), torch_dtype(ctx.output_type())
    return ctx.call(_window, size, periodic, *_WINDOWS[ctx.node.op_type], dtype, ctx.device)  # type: ignore[no-any-return]


def _window(
    size: int, periodic: bool, a: float, b: float, c: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    turn: Any = 2 * math.pi / max(size if periodic else size - 1, 1)
    angles = torch.arange(size, dtype=torch.float64, device=device) * turn
    return (a - b * torch.cos(angles) + c * torch.cos(2 * angles)).to(dtype)


@lowering("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike")
def random(ctx: NodeContext) -> torch.Tensor:
    like = ctx.node.op_type.endswith("Like")
    shape = [ctx.size(0, axis) for axis in range(ctx.rank())] if like else ctx.integers("shape", [])
    is_normal = ctx.node.op_type.startswith("RandomNormal")
    if is_normal:
        numbers = (ctx.number("mean", 0.0), ctx.number("scale", 1.0))
    else:
        numbers = (ctx.number("low", 0.0), ctx.number("high", 1.0))
    return ctx.call(_normal if is_normal else _uniform, shape, *numbers, torch_dtype(ctx.output_type()), ctx.device)  # type: ignore[no-any-return]


def _normal(shape: list[int], mean: float, scale: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, device=device) * scale + mean


def _uniform(shape: list[int], low: float, high: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.rand(shape, dtype=dtype, device=device) * (high - low) + low


@lowering("Multinomial")
def multinomial(ctx: NodeContext) -> torch.Tensor:
    chances = torch.softmax(ctx.tensor(0), 1)  # the input has logarithms
    return torch.multinomial(chances, ctx.integer("sample_size", 1), True).to(torch_dtype(ctx.output_type()))
