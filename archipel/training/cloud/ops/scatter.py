"""Writing into copies of tensors.

Sums are the same in each run on the CPU; on CUDA they are with `torch.use_deterministic_algorithms(True)`.
"""

from __future__ import annotations

import math

import onnx_ir as ir
import torch

from archipel.training.cloud.ops.context import NodeContext
from archipel.training.cloud.ops.gather import flat_rows, from_end
from archipel.training.cloud.ops.table import lowering
from archipel.training.cloud.ops.types import wrap

_REDUCE = {"mul": "prod", "max": "amax", "min": "amin"}


@lowering("ScatterElements")
def scatter_elements(ctx: NodeContext) -> torch.Tensor:
    axis = ctx.axis("axis", 0)
    index = from_end(ctx, 1, ctx.size(0, axis))
    return _scatter(ctx.tensor(0), axis, index, ctx.tensor(2), ctx.text("reduction", "none"), ctx.output_type())


@lowering("ScatterND")
def scatter_nd(ctx: NodeContext) -> torch.Tensor:
    reduction = ctx.text("reduction", "none")
    return ctx.call(_scatter_nd, *ctx.tensors(), reduction, ctx.output_type())  # type: ignore[no-any-return]


def _scatter(
    x: torch.Tensor, axis: int, index: torch.Tensor, updates: torch.Tensor, reduction: str, dtype: ir.DataType
) -> torch.Tensor:
    if reduction == "none":
        return x.scatter(axis, index, updates)
    if reduction == "add":
        # Not scatter_reduce, which has no deterministic sum on CUDA.
        return wrap(x.scatter_add(axis, index, updates), dtype)
    return wrap(x.scatter_reduce(axis, index, updates, _REDUCE[reduction]), dtype)


def _scatter_nd(
    x: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor, reduction: str, dtype: ir.DataType
) -> torch.Tensor:
    depth = indices.shape[-1]
    count, width = math.prod(x.shape[:depth]), math.prod(x.shape[depth:])
    rows = flat_rows(indices, x.shape[:depth]).reshape(-1, 1).expand(-1, width)
    found = _scatter(x.reshape(count, width), 0, rows, updates.reshape(-1, width), reduction, dtype)
    return found.reshape(x.shape)
