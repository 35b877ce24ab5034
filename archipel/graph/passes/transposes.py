"""Transposes that move nothing, stand between Reshapes, or are undone further down."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from archipel.graph.build import Builder
from archipel.graph.passes.base import LevelPass
from archipel.graph.passes.replacement import take_over
from archipel.graph.shapes import dims, is_static, rank, same_shape
from archipel.graph.walk import only_use

_POINTWISE = frozenset(
    {"Relu", "LeakyRelu", "Elu", "Selu", "Celu", "Sigmoid", "Tanh", "HardSigmoid", "HardSwish", "Softplus", "Softsign"}
    | {"Mish", "Gelu", "Erf", "Abs", "Neg", "Exp", "Log", "Sqrt", "Clip", "Cast", "Identity"}
)


class SimplifyTransposes(LevelPass):
    """A Transpose that only moves axes of size 1 becomes a Reshape, one between two Reshapes loses them, and one whose
    inverse follows after pointwise operators cancels with it."""

    def change_level(self, op: Builder) -> bool:
        modified = False
        # First those between Reshapes: as a Reshape of its own a Transpose would no longer be recognized.
        for node in list(op.graph):
            if node.graph is not None and _perm(node) is not None:
                modified |= _drop_reshapes(op, node)
        for node in list(op.graph):
            if node.graph is not None and (perm := _perm(node)) is not None:
                modified |= _replace_by_reshape(op, node, perm) or _cancel(op, node, perm)
        return modified


simplify_transposes = SimplifyTransposes()


def _perm(node: ir.Node | None) -> list[int] | None:
    if node is None or node.op_type != "Transpose" or node.domain != "":
        return None
    source = node.inputs[0]
    if source is None or source.shape is None:
        return None
    return list(node.attributes.get_ints("perm", range(rank(source) - 1, -1, -1)))


def _replace_by_reshape(op: Builder, node: ir.Node, perm: list[int]) -> bool:
    # The order in memory stays if all axes but those of size 1 keep their order.
    source, output = node.inputs[0], node.outputs[0]
    if source is None:
        return False
    shape = dims(source)
    moved = [axis for axis in perm if shape[axis] != 1]
    target = [shape[axis] for axis in perm]
    if moved != sorted(moved) or sum(not isinstance(d, int) for d in target) > 1 or 0 in target:
        return False
    with op.after(node):
        result = op.Reshape(source, np.array([d if isinstance(d, int) else -1 for d in target], np.int64))
    result.shape = ir.Shape(target)
    take_over(op, output, result)
    op.graph.remove(node, safe=True)
    return True


def _drop_reshapes(op: Builder, node: ir.Node) -> bool:
    """[*a, m, n] -> [k, m, n] -> [k, n, m] -> [*a, n, m], as exporters write attention, is one Transpose."""
    source = node.inputs[0]
    before = None if source is None else source.producer()
    after = _only_reader(node)
    if before is None or after is None or before.op_type != "Reshape" or after.op_type != "Reshape":
        return False
    whole, result = before.inputs[0], after.outputs[0]
    # Only if the last two axes are the same before and after, and the Reshapes do nothing but merge the leading ones.
    if _perm(node) != [0, 2, 1] or whole is None or whole.shape is None or result.shape is None or source is None:
        return False
    shape, lines = dims(whole), list(dims(source)[1:])
    if len(shape) < 3 or list(shape[-2:]) != lines or not is_static(lines):
        return False
    if not same_shape(dims(result), [*shape[:-2], lines[1], lines[0]]):
        return False
    with op.after(after):
        swapped = op.swap_last(whole)
    take_over(op, result, swapped)
    op.graph.remove(after, safe=True)
    return True


def _cancel(op: Builder, node: ir.Node, perm: list[int]) -> bool:
    # Pointwise operators give the same elements in any order of axes. Each on the path has one reader and one input.
    path: list[ir.Node] = []
    reader = _only_reader(node)
    while reader is not None and reader.op_type in _POINTWISE and reader.domain == "":
        path.append(reader)
        reader = _only_reader(reader)
    back = _perm(reader)
    if reader is None or back is None or [perm[axis] for axis in back] != sorted(perm):
        return False
    if not path:
        return False  # a rule of onnxscript cancels adjacent Transposes
    path[0].replace_input_with(0, node.inputs[0])
    for step in path:
        shape: Sequence[int | str | None] = dims(step.inputs[0])  # type: ignore[arg-type]
        step.outputs[0].shape = ir.Shape(shape)
    take_over(op, reader.outputs[0], path[-1].outputs[0])
    op.graph.remove(reader, safe=True)
    op.graph.remove(node, safe=True)
    return True


def _only_reader(node: ir.Node) -> ir.Node | None:
    """The only reader of the node's only output, as its first input and in the same graph."""
    reader, index = only_use(node.outputs[0]) or (None, 0)
    if len(node.outputs) != 1 or reader is None or index != 0 or reader.graph is not node.graph:
        return None
    return reader
