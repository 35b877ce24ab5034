"""What one stage of a pipeline sends to the next, and its gradient, lie in memory in order: gloo sends nothing else."""

from __future__ import annotations

from typing import Any

import torch


class _Contiguous(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        return value.contiguous()

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return gradients[0].contiguous()


def contiguous(value: torch.Tensor) -> torch.Tensor:
    """The value, with its elements in order, and the same for its gradient."""
    if not value.requires_grad:
        return value.contiguous()
    result: torch.Tensor = _Contiguous.apply(value)  # type: ignore[no-untyped-call]
    return result
