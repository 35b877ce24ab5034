"""archipel's marks for gradients: the identity, with a gradient of its own."""

from __future__ import annotations

from typing import Any

import torch

from archipel.graph.markers import CLIP, DOMAIN, STOP, STRAIGHT
from archipel.training.cloud.ops.context import NodeContext
from archipel.training.cloud.ops.table import lowering


@lowering(STOP, domain=DOMAIN)
def stop_gradient(ctx: NodeContext) -> torch.Tensor:
    return ctx.tensor(0).detach()


@lowering(STRAIGHT, domain=DOMAIN)
def straight_through(ctx: NodeContext) -> torch.Tensor:
    return ctx.call(pass_straight, ctx.tensor(0), ctx.tensor(1))  # type: ignore[no-any-return]


@lowering(CLIP, domain=DOMAIN)
def clip_gradient(ctx: NodeContext) -> torch.Tensor:
    limit, by_value = ctx.number("limit", 1.0), ctx.text("by", "value") == "value"
    return ctx.call(limit_gradient, ctx.tensor(0), limit, by_value)  # type: ignore[no-any-return]


def pass_straight(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """y, whose gradient goes to x as a whole."""
    return _StraightThrough.apply(x, y)  # type: ignore[no-any-return, no-untyped-call]


def limit_gradient(x: torch.Tensor, limit: float, by_value: bool) -> torch.Tensor:
    """x, whose gradient is clipped: each element, or the whole by its norm."""
    return _ClipGradient.apply(x, limit, by_value)  # type: ignore[no-any-return, no-untyped-call]


class _StraightThrough(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _ClipGradient(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, limit: float, by_value: bool) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.limit, ctx.by_value = inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        g, limit = gradients[0], ctx.limit
        if ctx.by_value:
            return g.clamp(-limit, limit), None, None
        square = (g * g).sum()
        return g * (limit / torch.sqrt(torch.clamp(square, min=limit * limit))), None, None
