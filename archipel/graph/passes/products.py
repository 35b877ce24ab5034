"""Matrix products with their Add or Transpose, as one Gemm."""

from __future__ import annotations

import onnx_ir as ir

from archipel.graph.build import Builder
from archipel.graph.passes.base import LevelPass
from archipel.graph.passes.replacement import take_over
from archipel.graph.shapes import dims, is_float, rank, same_dim, same_shape
from archipel.graph.walk import only_reader


class UseGemm(LevelPass):
    """MatMul of matrices and the Add after it become Gemm, which takes a transposed matrix as it is stored."""

    def change_level(self, op: Builder) -> bool:
        modified = False
        for node in list(op.graph):
            if node.domain != "" or node.op_type != "Add":
                continue
            a, b = node.inputs
            if a is not None and b is not None:
                modified |= _join(op, node, a, b) or _join(op, node, b, a)
        for node in list(op.graph):
            if node.domain == "" and node.op_type == "Gemm":
                modified |= _absorb_transposes(node)
        return modified


use_gemm = UseGemm()


class TransposeProducts(LevelPass):
    """Products of two matrices of which the second, or the result, is transposed become one Gemm: (A B)^T = B^T A^T.

    Such are a layer that reads its weight behind a Transpose, and this weight's gradient, which is as large. ONNX
    Runtime joins a product with its Add first, and then no longer with the Transpose, which would run in each step.
    """

    def change_level(self, op: Builder) -> bool:
        modified = False
        for node in list(op.graph):
            if node.op_type == "MatMul" and node.domain == "":
                modified |= _read_transposed(op, node)
        for node in list(op.graph):
            if _is_swap(node) and node.inputs[0] is not None:
                modified |= _swap_factors(op, node, node.inputs[0])
        return modified


transpose_products = TransposeProducts()


def _read_transposed(op: Builder, node: ir.Node) -> bool:
    left, right = node.inputs
    swap = None if right is None else right.producer()
    if left is None or left.shape is None or rank(left) != 2 or swap is None or not _is_swap(swap):
        return False
    with op.after(node):
        result = op.Gemm(left, swap.inputs[0], transB=1)
    result.shape = node.outputs[0].shape
    take_over(op, node.outputs[0], result)
    op.graph.remove(node, safe=True)
    return True


def _swap_factors(op: Builder, node: ir.Node, product: ir.Value) -> bool:
    maker = product.producer()
    if maker is None or maker.domain != "" or maker.graph is not op.graph or only_reader(product) is None:
        return False
    if maker.op_type not in ("MatMul", "Gemm") or any(value is not None for value in maker.inputs[2:]):
        return False
    factors, flags = [], []
    for value, name in zip(maker.inputs, ("transA", "transB")):
        if value is None or value.shape is None or rank(value) != 2:
            return False
        source, swapped = value.producer(), maker.attributes.get_int(name, 0)
        if source is not None and _is_swap(source) and source.inputs[0] is not None:
            value, swapped = source.inputs[0], 1 - swapped
        factors.append(value)
        flags.append(1 - swapped)
    alpha = maker.attributes.get_float("alpha", 1.0)
    with op.after(node):
        result = op.Gemm(factors[1], factors[0], alpha=alpha, transA=flags[1], transB=flags[0])
    result.shape = node.outputs[0].shape
    take_over(op, node.outputs[0], result)
    op.graph.remove(node, safe=True)
    return True


def _is_swap(node: ir.Node) -> bool:
    """Whether the node transposes a matrix."""
    source = node.inputs[0] if node.inputs else None
    known = node.op_type == "Transpose" and node.domain == "" and source is not None and source.shape is not None
    return known and list(node.attributes.get_ints("perm", (1, 0))) == [1, 0] and rank(source) == 2  # type: ignore[arg-type]


def _join(op: Builder, node: ir.Node, product: ir.Value, addend: ir.Value) -> bool:
    matmul = product.producer()
    if matmul is None or matmul.op_type != "MatMul" or matmul.domain != "":
        return False
    if only_reader(product) is None or not is_float(product) or matmul.graph is not node.graph:
        return False
    # Gemm takes matrices only.
    values = (*matmul.inputs, product, node.outputs[0])
    if addend.shape is None or any(value is None or value.shape is None or len(value.shape) != 2 for value in values):
        return False
    size, added = dims(product), dims(addend)
    # Gemm broadcasts its third input to the product, and not the product to the third input as Add does.
    spreads = len(added) <= 2 and all(x == 1 or same_dim(x, y) for x, y in zip(reversed(added), reversed(size)))
    if not spreads or not same_shape(size, dims(node.outputs[0])):
        return False
    with op.after(node):
        result = op.Gemm(matmul.inputs[0], matmul.inputs[1], addend)
    take_over(op, node.outputs[0], result)
    node.graph.remove(node, safe=True)  # type: ignore[union-attr]
    return True


def _absorb_transposes(gemm: ir.Node) -> bool:
    modified = False
    for place, name in enumerate(("transA", "transB")):
        value = gemm.inputs[place]
        source = None if value is None else value.producer()
        if source is not None and _is_swap(source):
            gemm.replace_input_with(place, source.inputs[0])
            gemm.attributes.add(ir.AttrInt64(name, 1 - gemm.attributes.get_int(name, 0)))
            modified = True
    return modified
