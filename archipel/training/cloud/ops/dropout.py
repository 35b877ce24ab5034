"""Dropout, with PyTorch's generator: as `nn.Dropout` draws, so does this."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from archipel.training.cloud.ops.context import NodeContext
from archipel.training.cloud.ops.table import lowering


class Dropout(nn.Module):
    """y = mask x / (1 - ratio) in training mode, else y = x (ONNX Dropout-13).

    Attributes:
        always: whether it drops in evaluation mode too, as the graph says.
        with_mask: whether the mask is a second result.
    """

    def __init__(self, always: bool, with_mask: bool) -> None:
        super().__init__()
        self.always = always
        self.with_mask = with_mask

    def forward(
        self, x: torch.Tensor, ratio: float | torch.Tensor, switch: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """switch: whether the graph drops, bool [], where it computes that."""
        drops = self.training or self.always
        if not self.with_mask and switch is None and isinstance(ratio, float):
            return functional.dropout(x, ratio, drops)
        if not drops and switch is None:
            return self._results(x, torch.ones_like(x, dtype=torch.bool))
        keep = torch.rand_like(x) >= ratio
        y = torch.where(keep, x / (1 - ratio), 0.0)
        if switch is not None and not drops:
            y, keep = torch.where(switch, y, x), keep | ~switch
        return self._results(y, keep)

    def _results(self, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        return (y, mask) if self.with_mask else y


@lowering("Dropout")
def dropout(ctx: NodeContext) -> torch.Tensor | tuple[torch.Tensor, ...]:
    constant = ctx.constant(1)
    ratio = 0.5 if not ctx.has(1) else float(constant.item()) if constant is not None else ctx.tensor(1).reshape([])
    mode = ctx.constant(2)
    with_mask = len(ctx.node.outputs) > 1 and bool(ctx.node.outputs[1].name)
    module = Dropout(mode is not None and bool(mode.any()), with_mask)
    switch = (ctx.tensor(2).reshape([]),) if ctx.has(2) and mode is None else ()
    found = ctx.module(module, ctx.tensor(0), ratio, *switch)
    return (found[0], found[1]) if with_mask else found
