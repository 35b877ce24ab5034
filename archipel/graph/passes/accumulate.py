"""Sums that a Gemm computes together with its product."""

from __future__ import annotations

import onnx_ir as ir

from archipel.graph.build import Builder
from archipel.graph.passes.base import LevelPass
from archipel.graph.passes.replacement import take_over
from archipel.graph.shapes import constant_array, dims, is_static, same_shape
from archipel.graph.walk import only_reader

# Scaling an operand of a Gemm by a number that is known at run time only costs batch x its width, and saves two passes
# over the product, its width x the other's: worth it if the other's width is at least that of a usual batch.
_WIDE = 64


class AccumulateInGemm(LevelPass):
    """c + A B becomes Gemm(A, B, c), also with c times a constant; p - s A B becomes Gemm(-s A, B, p).

    Momentum and plain gradient descent are such sums over weight matrices; each of them costs a pass over memory.
    """

    def change_level(self, op: Builder) -> bool:
        modified = False
        for node in list(op.graph):
            if node.domain != "" or node.op_type not in ("Add", "Sub"):
                continue
            a, b = node.inputs
            if a is None or b is None:
                continue
            if node.op_type == "Sub":
                modified |= _join_descent(op, node, a, b)
            else:
                modified |= _join_sum(op, node, a, b) or _join_sum(op, node, b, a)
        return modified


accumulate_in_gemm = AccumulateInGemm()


def _join_sum(op: Builder, node: ir.Node, product: ir.Value, addend: ir.Value) -> bool:
    gemm = _bare_gemm(product)
    if gemm is None or gemm.graph is not op.graph or not same_shape(dims(product), dims(addend)):
        return False
    # c = value * constant, in either order: the constant becomes beta.
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


def _join_descent(op: Builder, node: ir.Node, start: ir.Value, change: ir.Value) -> bool:
    scaled = _only_use(change, "Mul")
    # In a loop around which the product is computed, it would be computed in every iteration.
    if scaled is None or scaled.graph is not op.graph or not same_shape(dims(start), dims(change)):
        return False
    for product, factor in (scaled.inputs, reversed(scaled.inputs)):
        gemm = None if product is None else _bare_gemm(product)
        if (
            gemm is None
            or gemm.graph is not op.graph
            or factor is None
            or dims(factor) != ()
            or not is_static(dims(start))
        ):
            continue
        rows, columns = dims(start)
        left, right = gemm.inputs[0], gemm.inputs[1]
        if not (isinstance(rows, int) and isinstance(columns, int)) or max(rows, columns) < _WIDE:
            continue
        with op.after(node):
            negative = op.Neg(factor)
            # The factor goes to the narrower operand.
            if columns >= rows:
                left = op.Mul(left, negative)
            else:
                right = op.Mul(right, negative)
        # The Gemm comes right behind the scaled operand, as its other inputs are older.
        anchor = (left if columns >= rows else right).producer()  # type: ignore[union-attr]
        _replace(op, node, gemm, left, right, start, 1.0, anchor)
        return True
    return False


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


def _bare_gemm(value: ir.Value) -> ir.Node | None:
    node = _only_use(value, "Gemm")
    return node if node is not None and (len(node.inputs) < 3 or node.inputs[2] is None) else None


def _only_use(value: ir.Value, op_type: str) -> ir.Node | None:
    """The node that makes `value`, if it is of this type and the value has one reader."""
    node = value.producer()
    if node is None or node.domain != "" or node.op_type != op_type or only_reader(value) is None:
        return None
    return node


def _same(a: ir.Value, b: ir.Value) -> bool:
    return same_shape(dims(a), dims(b))
