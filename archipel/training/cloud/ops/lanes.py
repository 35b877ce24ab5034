"""Scans that treat each item for itself, as `autodiff.vmap` writes them where ONNX has no operator for all lanes.

Such a Scan is one call for all items: a convolution with weights of each lane is a grouped one in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir
import torch

from archipel.training.cloud.ops.gradients import DOMAIN

Items = Sequence[tuple[torch.Tensor, int]]
"""Tensors, and the axis of each along which its items lie."""

Map = Callable[[Callable[..., tuple[torch.Tensor, ...]], Items, Sequence[torch.Tensor], Sequence[int]], object]

_ANY_AXES = {(DOMAIN, "Relu"), (DOMAIN, "MaxPool")}
"""What takes further axes in front as it is."""

_MAPPED = {("", "Conv"), ("", "ConvTranspose"), (DOMAIN, "ConvWeight")}
"""What `torch.func.vmap` makes one call of, and that `autodiff.vmap` leaves in a Scan."""


def find_map(body: ir.Graph, axes: Sequence[int], results: Sequence[int]) -> Map | None:
    """How all iterations of a Scan without states are computed at once; None: one after the other.

    Arguments:
        body: the Scan's.
        axes: along which its inputs have their items.
        results: along which its outputs have them.
    """
    if len(body) != 1:
        return None
    node = body[0]
    if (node.domain, node.op_type) in _ANY_AXES and not any((*axes, *results)) and len(axes) == len(node.inputs):
        return _at_once
    return _by_vmap if (node.domain, node.op_type) in _MAPPED else None


def _at_once(
    module: Callable[..., tuple[torch.Tensor, ...]],
    items: Items,
    captured: Sequence[torch.Tensor],
    results: Sequence[int],
) -> tuple[torch.Tensor, ...]:
    return module(*(tensor for tensor, _ in items), *captured)


def _by_vmap(
    module: Callable[..., tuple[torch.Tensor, ...]],
    items: Items,
    captured: Sequence[torch.Tensor],
    results: Sequence[int],
) -> tuple[torch.Tensor, ...]:
    dims = (*(axis for _, axis in items), *[None] * len(captured))
    return torch.func.vmap(module, dims, tuple(results))(*(tensor for tensor, _ in items), *captured)
