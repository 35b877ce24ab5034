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
    return ctx.call(_pass_straight, ctx.tensor(0), ctx.tensor(1))  # type: ignore[no-any-return]


@lowering(CLIP, domain=DOMAIN)
def clip_gradient(ctx: NodeContext) -> torch.Tensor:
    limit, by = ctx.number("limit", 1.0), ctx.text("by", "value")
    return ctx.call(_clip_gradient, ctx.tensor(0), limit, by == "value")  # type: ignore[no-any-return]


# A traced graph calls functions by their names, which `apply` of a class has not.
def _pass_straight(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _StraightThrough.apply(x, y)  # type: ignore[no-any-return, no-untyped-call]


def _clip_gradient(x: torch.Tensor, limit: float, by_value: bool) -> torch.Tensor:
    return _ClipGradient.apply(x, limit, by_value)  # type: ignore[no-any-return, no-untyped-call]


class _StraightThrough(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
        """Nothing has to be kept."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _ClipGradient(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, limit: float, by_value: bool) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, float, bool], output: torch.Tensor) -> None:
        _, ctx.limit, ctx.by_value = inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        g, limit = gradients[0], ctx.limit
        if ctx.by_value:
            return g.clamp(-limit, limit), None, None
        square = (g * g).sum()
        return g * (limit / torch.sqrt(torch.clamp(square, min=limit * limit))), None, None
