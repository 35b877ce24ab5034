"""The one table from operator to its lowering: the function that says in PyTorch's words what a node computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from archipel.errors import MissingLoweringError

if TYPE_CHECKING:
    from archipel.training.cloud.ops.context import NodeContext

Lowering = Callable[["NodeContext"], Any]

LOWERINGS: dict[tuple[str, str], Lowering] = {}
"""(domain, operator) -> lowering. `@lowering` fills it; importing `archipel.training.cloud.ops` registers all."""


def lowering(*op_types: str, domain: str = "") -> Callable[[Lowering], Lowering]:
    """Register the lowering of some operators, as a decorator.

    The function takes a `NodeContext` and returns the node's outputs: one value, or a tuple with one for each output.
    It is written for tensors. While a graph is traced it is called with `torch.fx.Proxy` in their place, and what it
    does becomes nodes of the traced graph; so its Python may branch on what the graph fixes (attributes, ranks, types,
    constants), and never on what a tensor holds.

    Arguments:
        op_types: the operators' names.
        domain: their domain; "" for standard ONNX.

    Example:
        @lowering("Relu")
        def relu(ctx):
            return torch.relu(ctx.tensor(0))
    """

    def register(function: Lowering) -> Lowering:
        for op_type in op_types:
            if (domain, op_type) in LOWERINGS:
                raise ValueError(f"{domain or 'ai.onnx'}::{op_type} has two lowerings")
            LOWERINGS[domain, op_type] = function
        return function

    return register


def find_lowering(node: ir.Node) -> Lowering:
    """The lowering of a node's operator. Raises MissingLoweringError."""
    found = LOWERINGS.get((node.domain, node.op_type))
    if found is None:
        raise MissingLoweringError(
            f"PyTorch does not run {node.domain + '::' if node.domain else ''}{node.op_type} (node {node.name!r}) yet; "
            "export the model without it, or register one with @archipel.training.cloud.ops.lowering"
        )
    return found
