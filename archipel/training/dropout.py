"""Dropout in training: masks from the counter-based hash in place of ONNX's own random numbers.

Element i of the operator's input is dropped where the upper 24 of its random bits, as a number in [0, 1), are below
`ratio`; the others are divided by 1 - ratio (Dropout-13). Each node has its own stream, numbered in graph order.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from archipel.errors import TrainingError
from archipel.graph.build import Builder
from archipel.graph.shapes import constant_array, dims, dtype_of, static_size
from archipel.graph.walk import inner_nodes
from archipel.training.assembly import Assembly
from archipel.training.hashing import Keys, Streams, bits

_UNIT = float(2**24)  # float32 has every integer up to this one


def activate(work: Assembly) -> list[Keys]:
    """Let every Dropout of the model drop, also one that the file has for inference. Returns the streams' keys."""
    # Made for the first node that drops: without one the program needs neither a seed nor the step's number.
    streams: Streams | None = None
    for node in filter(is_dropout, inner_nodes(work.graph)):
        raise TrainingError(
            f"Dropout {node.name!r} is inside a loop or branch, where masks are not supported; move it outside, or "
            "pass dropout=False"
        )
    for node in _nodes(work.graph):
        source, ratio = node.inputs[0], _ratio(node)
        if source is None or ratio == 0:
            _remove(work, node)
            continue
        streams = streams or Streams(work)
        with work.op.after(node), work.op.scope(str(node.name)):
            keep = _keep(work.op, source, ratio, streams.keys_of_next())
            scaled = _scaled(work.op, keep, source, ratio)
            work.replace(node.outputs[0], work.op.Mul(source, scaled))
            if len(node.outputs) > 1:
                work.replace(node.outputs[1], keep)
    return [] if streams is None else streams.keys


def deactivate(work: Assembly) -> list[Keys]:
    """Take every Dropout out of the graph. Returns no keys, as there are no streams."""
    for node in _nodes(work.graph):
        _remove(work, node)
    return []


def _nodes(graph: Iterable[ir.Node]) -> list[ir.Node]:
    return [node for node in graph if is_dropout(node)]


def is_dropout(node: ir.Node) -> bool:
    return node.op_type == "Dropout" and node.domain == ""


def _remove(work: Assembly, node: ir.Node) -> None:
    source = node.inputs[0]
    if source is None:
        raise TrainingError(f"Dropout {node.name!r} has no input")
    work.replace(node.outputs[0], source)
    if len(node.outputs) > 1:
        with work.op.after(node):
            work.replace(node.outputs[1], work.op.Cast(work.op.full_like(source, 1.0), to=int(ir.DataType.BOOL)))


def _ratio(node: ir.Node) -> float | ir.Value:
    given = node.inputs[1] if len(node.inputs) > 1 else None
    if given is None:
        return 0.5  # ONNX's default
    content = constant_array(given)
    return given if content is None else float(content.reshape(()))


def _keep(op: Builder, source: ir.Value, ratio: float | ir.Value, keys: Keys) -> ir.Value:
    """The mask, true for elements that stay: bool in the shape of `source`."""
    size = static_size(dims(source))  # the counter of an element is its place in memory, whatever the shape
    counters = op.Range(0, op.Size(source) if size is None else size, 1)
    drawn = bits(op, op.Cast(counters, to=int(ir.DataType.UINT32)), keys)
    upper = op.Cast(op.BitShift(drawn, np.array(8, np.uint32), direction="RIGHT"), to=int(ir.DataType.FLOAT))
    if isinstance(ratio, ir.Value):
        limit = op.Mul(op.Cast(ratio, to=int(ir.DataType.FLOAT)), _UNIT)
    else:  # rounded to float32 as the other branch does it, so that both drop the same elements
        limit = op.constant(np.array(np.float32(ratio) * np.float32(_UNIT)))
    return op.reshape_like(op.GreaterOrEqual(upper, limit), source)


def _scaled(op: Builder, keep: ir.Value, source: ir.Value, ratio: float | ir.Value) -> ir.Value:
    """The mask as factors: 0 for dropped elements, 1 / (1 - ratio) for the others."""
    dtype = dtype_of(source)
    mask = op.Cast(keep, to=int(dtype))
    if isinstance(ratio, ir.Value):
        # At a ratio of 1 no element stays, and any finite factor will do: 0 / 0 would be NaN.
        result = op.Div(mask, op.Max(op.Sub(1.0, op.Cast(ratio, to=int(dtype))), 2.0**-24))
    else:
        result = op.Mul(mask, 1.0 / max(1.0 - ratio, 2.0**-24))
    return result
