"""The markers in PyTorch: steps that compute the identity, or round, with a gradient of their own."""

from __future__ import annotations

import torch


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return torch.round(x)

    @staticmethod
    def backward(ctx: object, g: torch.Tensor) -> torch.Tensor:
        return g


class Limited(torch.autograd.Function):
    """The identity, whose gradient is clipped; differentiable twice, for it is written in operators of torch."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, limit: float, by: str) -> torch.Tensor:
        ctx.limit, ctx.by = limit, by  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, g: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        limit: float = ctx.limit  # type: ignore[attr-defined]
        if ctx.by == "value":  # type: ignore[attr-defined]
            return g.clamp(-limit, limit), None, None
        return g * torch.clamp(limit / g.norm(), max=1.0), None, None
