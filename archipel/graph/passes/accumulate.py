"""Sums that a product or a concatenation can take over."""

from __future__ import annotations

import onnx_ir as ir

from archipel.graph.build import Builder
from archipel.graph.shapes import constant_array, dims, is_static, same_shape

# Scaling an operand of Gemm by a number that shows at run time costs (batch x its width), and saves two passes over
# the product (its width x the other's): worth it where the other is about as wide as a usual batch is long.
_WIDE = 64


def accumulate_in_gemm(op: Builder) -> None:
    """c + A B becomes Gemm(A, B, c), also with c times a constant; p - s A B becomes Gemm(-s A, B, p).

    Momentum and plain gradient descent are such sums over weight matrices; each that is saved is a pass over memory.
    """
    for node in list(op.graph):
        if node.domain != "" or node.op_type not in ("Add", "Sub"):
            continue
        a, b = node.inputs
        if a is None or b is None:
            continue
        if node.op_type == "Sub":
            _descend(op, node, a, b)
        elif not _add(op, node, a, b):
            _add(op, node, b, a)


def _add(op: Builder, node: ir.Node, product: ir.Value, addend: ir.Value) -> bool:
    gemm = _bare_gemm(product)
    if gemm is None or not same_shape(dims(product), dims(addend)):
        return False
    beta = 1.0
    scale = _only_use(addend, "Mul")
    if scale is not None:
        for value, factor in (scale.inputs, reversed(scale.inputs)):
            constant = constant_array(factor)
            if constant is not None and constant.size == 1 and value is not None and _same(value, addend):
                addend, beta = value, float(constant.reshape(()))
                break
    _replace(op, node, gemm, gemm.inputs[0], gemm.inputs[1], addend, beta)
    return True


def _descend(op: Builder, node: ir.Node, start: ir.Value, change: ir.Value) -> None:
    scaled = _only_use(change, "Mul")
    if scaled is None or not same_shape(dims(start), dims(change)):
        return
    for product, factor in (scaled.inputs, reversed(scaled.inputs)):
        gemm = None if product is None else _bare_gemm(product)
        if gemm is None or factor is None or dims(factor) != () or not is_static(dims(start)):
            continue
        rows, columns = dims(start)
        left, right = gemm.inputs[0], gemm.inputs[1]
        if not (isinstance(rows, int) and isinstance(columns, int)) or max(rows, columns) < _WIDE:
            continue
        with op.after(node):
            negative = op.Neg(factor)
            if columns >= rows:
                left = op.Mul(left, negative)
            else:
                right = op.Mul(right, negative)
        anchor = (left if columns >= rows else right).producer()  # type: ignore[union-attr]
        _replace(op, node, gemm, left, right, start, 1.0, anchor)
        return


def _replace(
    op: Builder,
    node: ir.Node,
    gemm: ir.Node,
    left: ir.Value | None,
    right: ir.Value | None,
    addend: ir.Value,
    beta: float,
    anchor: ir.Node | None = None,
) -> None:
    kept = {name: attribute.value for name, attribute in gemm.attributes.items() if name != "beta"}
    with op.after(anchor or node):
        result = op.Gemm(left, right, addend, beta=beta, **kept)
    take_over(op, node.outputs[0], result)


def take_over(op: Builder, old: ir.Value, new: ir.Value) -> None:
    """Let `new` be read, and be the output of the graph, where `old` was."""
    if old.is_graph_output():
        old.name, new.name = op.unique(f"{old.name}/before"), old.name
    old.replace_all_uses_with(new, replace_graph_outputs=True)


def concatenate_pads(op: Builder) -> None:
    """A sum of zero-padded parts that lie side by side along one axis becomes their Concat.

    Reading a tensor in slices leaves such a sum as its gradient: gates of a recurrent layer, heads of attention.
    """
    for node in list(op.graph):
        if node.op_type != "Add" or node.domain != "":
            continue
        uses = list(node.outputs[0].uses())
        if len(uses) == 1 and uses[0].node.op_type == "Add" and _parts(uses[0].node.outputs[0]) is not None:
            continue  # part of a longer sum, which is looked at from its end
        parts = _parts(node.outputs[0])
        placed = None if parts is None else _place(parts)
        if placed is None:
            continue
        axis, pieces = placed
        with op.after(node):
            result = op.Concat(*pieces, axis=axis)
        take_over(op, node.outputs[0], result)


def _parts(value: ir.Value, root: bool = True) -> list[ir.Node] | None:
    """The Pads that are added up in `value`; None if anything else is."""
    node = value.producer()
    if node is None or node.domain != "" or (not root and (len(list(value.uses())) != 1 or value.is_graph_output())):
        return None
    if node.op_type == "Pad":
        return [node]
    if node.op_type != "Add" or node.inputs[0] is None or node.inputs[1] is None:
        return None
    left, right = _parts(node.inputs[0], False), _parts(node.inputs[1], False)
    return None if left is None or right is None else left + right


def _place(pads: list[ir.Node]) -> tuple[int, list[ir.Value]] | None:
    """The axis along which the padded parts lie side by side without gap, and the parts in order."""
    spans: dict[int, tuple[int, ir.Value]] = {}
    common: int | None = None
    for node in pads:
        amounts = constant_array(node.inputs[1])
        mode = node.attributes.get("mode")
        if len(node.inputs) > 2 or amounts is None or (mode is not None and mode.value != "constant"):
            return None
        inner, rank = node.inputs[0], len(amounts) // 2
        padded = [axis for axis in range(rank) if amounts[axis] or amounts[axis + rank]]
        if inner is None or len(padded) != 1 or (common is not None and padded[0] != common) or (amounts < 0).any():
            return None
        common = padded[0]
        start = int(amounts[common])
        if start in spans:
            return None
        spans[start] = (int(amounts[common + rank]), inner)
    if common is None:
        return None
    position, pieces = 0, []
    for start in sorted(spans):
        size = dims(spans[start][1])[common]
        if start != position or not isinstance(size, int):
            return None
        pieces.append(spans[start][1])
        position += size
    return (common, pieces) if spans[max(spans)][0] == 0 else None


def _bare_gemm(value: ir.Value) -> ir.Node | None:
    node = _only_use(value, "Gemm")
    return node if node is not None and (len(node.inputs) < 3 or node.inputs[2] is None) else None


def _only_use(value: ir.Value, op_type: str) -> ir.Node | None:
    """The standard node that makes `value`, if it is of this type and nothing else reads the value."""
    node = value.producer()
    if node is None or node.domain != "" or node.op_type != op_type or value.is_graph_output():
        return None
    return node if len(list(value.uses())) == 1 else None


def _same(a: ir.Value, b: ir.Value) -> bool:
    return same_shape(dims(a), dims(b))
