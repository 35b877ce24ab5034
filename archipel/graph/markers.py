"""Markers: functions that compute the identity and say what a gradient does where it passes them.

They are model-local functions with a body of one Identity, so a saved model keeps them and any runtime runs them. The
import leaves them in place, and gradients keep those that are still in use, for the next gradient. Programs and
everything else that is deployed have them inlined.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import onnx_ir as ir

from archipel.graph.opset import OPSET

if TYPE_CHECKING:
    from archipel.graph.build import Builder

DOMAIN = "archipel.gradient"
STOP = "StopGradient"
CLIP = "ClipGradient"
STRAIGHT = "StraightThrough"
MARKERS = frozenset({(DOMAIN, STOP), (DOMAIN, CLIP), (DOMAIN, STRAIGHT)})

# The last input is what the function returns.
_INPUTS = {STOP: 1, CLIP: 1, STRAIGHT: 2}
_ATTRIBUTES = {CLIP: [("limit", ir.AttributeType.FLOAT), ("by", ir.AttributeType.STRING)]}


def is_marker(node: ir.Node, op_type: str) -> bool:
    return node.domain == DOMAIN and node.op_type == op_type


def marker(op: Builder, op_type: str, inputs: Sequence[ir.Value], settings: Iterable[ir.Attr] = ()) -> ir.Node:
    """A node of the marker that is in no graph yet, with the last input's type and shape."""
    name = op.unique(f"{inputs[-1].name}/{op_type}")
    out = ir.Value(name=op.unique(f"{name}:0"), type=inputs[-1].type, shape=inputs[-1].shape)
    return ir.Node(DOMAIN, op_type, inputs, list(settings), outputs=[out], name=name)


def define_marker(model: ir.Model, op_type: str) -> None:
    """Give the model the marker's function, if it has it not yet."""
    key = (DOMAIN, op_type, "")
    model.graph.opset_imports[DOMAIN] = 1
    if key in model.functions:
        return
    inputs = [ir.Value(name=f"x{i}") for i in range(_INPUTS[op_type])]
    body = ir.Node("", "Identity", [inputs[-1]], outputs=[ir.Value(name="y")], name="identity")
    graph = ir.Graph(inputs, body.outputs, nodes=[body], name=op_type, opset_imports={"": OPSET})
    attributes = [ir.Attr(name, kind, None) for name, kind in _ATTRIBUTES.get(op_type, [])]
    model.functions[key] = ir.Function(DOMAIN, op_type, graph=graph, attributes=attributes)
