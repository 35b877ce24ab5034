"""Matrix products with their Add or Transpose, as one Gemm."""

from __future__ import annotations

import onnx_ir as ir

from archipel.graph.build import Builder
from archipel.graph.passes.base import GraphPass
from archipel.graph.passes.replacement import take_over
from archipel.graph.shapes import dims, is_float, same_dim, same_shape
from archipel.graph.walk import only_reader


class UseGemm(GraphPass):
    """MatMul of matrices and the Add after it become Gemm, which takes a transposed matrix as it is stored."""

    def change(self, model: ir.Model) -> bool:
        op = Builder(model.graph)
        modified = False
        for node in list(model.graph):
            if node.domain != "" or node.op_type != "Add":
                continue
            a, b = node.inputs
            if a is not None and b is not None:
                modified |= _join(op, node, a, b) or _join(op, node, b, a)
        for node in list(model.graph):
            if node.domain == "" and node.op_type == "Gemm":
                modified |= _absorb_transposes(node)
        return modified


use_gemm = UseGemm()


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
        swapped = source is not None and source.op_type == "Transpose" and source.domain == ""
        if source is not None and swapped and source.attributes.get_ints("perm", [1, 0]) in ([1, 0], (1, 0)):
            gemm.replace_input_with(place, source.inputs[0])
            gemm.attributes.add(ir.AttrInt64(name, 1 - gemm.attributes.get_int(name, 0)))
            modified = True
    return modified
