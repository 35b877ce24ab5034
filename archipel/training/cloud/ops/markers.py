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
    x, y = ctx.tensor(0), ctx.tensor(1)
    return ctx.call(_StraightThrough.apply, x, y)  # type: ignore[no-any-return]


@lowering(CLIP, domain=DOMAIN)
def clip_gradient(ctx: NodeContext) -> torch.Tensor:
    limit, by = ctx.number("limit", 1.0), ctx.text("by", "value")
    return ctx.call(_ClipGradient.apply, ctx.tensor(0), limit, by == "value")  # type: ignore[no-any-return]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _ClipGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, limit: float, by_value: bool) -> torch.Tensor:
        ctx.limit, ctx.by_value = limit, by_value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        g, limit = gradients[0], ctx.limit
        if ctx.by_value:
            return g.clamp(-limit, limit), None, None
        square = (g * g).sum()
        return g * (limit / torch.sqrt(torch.clamp(square, min=limit * limit))), None, None
