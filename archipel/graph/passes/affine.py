"""Per-channel factors and summands, folded into the weight and bias of the layer before them."""

from __future__ import annotations

import onnx_ir as ir

from archipel.graph.build import Builder
from archipel.graph.passes.base import LevelPass
from archipel.graph.passes.constants import constant_values, is_unpacked
from archipel.graph.passes.replacement import take_over
from archipel.graph.shapes import Dim, dims, is_float, is_static
from archipel.graph.walk import only_reader

_LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})


class FoldAffine(LevelPass):
    """Fold a Mul, Div, Add or Sub with one constant per channel into the layer before it.

    Emits nodes that compute the new weight and bias from the layer's own, which stay as they are. Skips tensors that
    are unpacked from a small stored form: their product would no longer be stored as integers.
    """

    def change_level(self, op: Builder) -> bool:
        fixed = constant_values(op.main)
        modified = False
        for node in list(op.graph):
            if node.domain != "" or node.op_type not in ("Mul", "Div", "Add", "Sub"):
                continue
            a, b = node.inputs
            if a is not None and b is not None:
                done = _fold(op, node, a, b, fixed)
                # Only commutative operators may have the layer as the second operand.
                if not done and node.op_type in ("Mul", "Add"):
                    done = _fold(op, node, b, a, fixed)
                modified |= done
        if modified and op.graph is op.main:
            op.graph.sort()  # a factor or summand may be laid out behind the layer that now reads it
        return modified


fold_affine = FoldAffine()


def _fold(op: Builder, node: ir.Node, result: ir.Value, operand: ir.Value, fixed: set[ir.Value]) -> bool:
    layer = result.producer()
    if layer is None or layer.domain != "" or layer.op_type not in _LAYERS or layer.graph is not node.graph:
        return False
    # Another reader of the layer's result needs it without the factor or summand.
    if only_reader(result) is None or not is_float(result) or operand not in fixed:
        return False
    channels = _channels(layer)
    if channels is None or not _for_each_channel(dims(operand), len(dims(result)), _axis(layer, result), channels):
        return False
    # y = W x + b: s y = (s W) x + s b, and y + t = W x + (b + t).
    weight, bias = layer.inputs[1], layer.inputs[2] if len(layer.inputs) > 2 else None
    scaling = node.op_type in ("Mul", "Div")
    moved = [value for value in (weight if scaling else None, bias) if value is not None]
    if any(value not in fixed or is_unpacked(value) for value in moved) or is_unpacked(operand):
        return False
    if layer.op_type == "MatMul" and not scaling:
        return False  # MatMul has no bias; `use_gemm` joins it with an Add
    if layer.op_type == "Gemm" and not _has_plain_bias(layer, channels):
        return False
    with op.before(layer), op.scope(f"{node.name or node.op_type}_folding"):
        vector = op.Reshape(operand, [-1])
        if scaling and weight is not None:
            layer.replace_input_with(1, op(node.op_type, weight, _along(op, layer, vector)))
        if bias is not None:
            layer.replace_input_with(2, op(node.op_type, bias, vector))
        elif not scaling:
            summand = vector if dims(vector) == (channels,) else op.Expand(vector, [channels])
            layer.resize_inputs(3)
            layer.replace_input_with(2, summand if node.op_type == "Add" else op.Neg(summand))
    # The new weight and bias are as fixed as what they were computed from, for the next node behind the layer.
    for value in layer.inputs[1:]:
        if value is not None and value.producer() is not None:
            fixed.add(value)
    take_over(op, node.outputs[0], result)
    node.graph.remove(node, safe=True)  # type: ignore[union-attr]
    return True


def _channels(layer: ir.Node) -> int | None:
    """The layer's output channels, read from its weight; None if they cannot be scaled through it."""
    weight = layer.inputs[1]
    if weight is None or weight.shape is None or not is_static(dims(weight)) or len(dims(weight)) < 2:
        return None
    size = [d for d in dims(weight) if isinstance(d, int)]
    if layer.op_type == "Conv":
        return size[0]
    if layer.op_type == "ConvTranspose":
        return size[1] if layer.attributes.get_int("group", 1) == 1 else None
    if layer.op_type == "MatMul":
        return size[1] if len(size) == 2 else None
    transposed = layer.attributes.get_int("transB", 0)
    return size[0] if transposed else size[1]


def _axis(layer: ir.Node, result: ir.Value) -> int:
    return 1 if layer.op_type in ("Conv", "ConvTranspose") else len(dims(result)) - 1


def _for_each_channel(shape: tuple[Dim, ...], rank: int, axis: int, channels: int) -> bool:
    """Whether a tensor of this shape broadcasts to one number for each channel of a result with this rank and axis."""
    if len(shape) > rank or not all(d in (1, channels) for d in shape):
        return False
    placed = [1] * (rank - len(shape)) + list(shape)
    return all(d == 1 or place == axis for place, d in enumerate(placed))


def _has_plain_bias(gemm: ir.Node, channels: int) -> bool:
    """Whether the bias is absent, or has one number per channel and beta = 1."""
    bias = gemm.inputs[2] if len(gemm.inputs) > 2 else None
    return bias is None or (dims(bias) == (channels,) and gemm.attributes.get_float("beta", 1.0) == 1.0)


def _along(op: Builder, layer: ir.Node, vector: ir.Value) -> ir.Value:
    """The vector [channels] or [1], so that it broadcasts along the weight's output channels."""
    weight = layer.inputs[1]
    rank = 2 if weight is None else len(dims(weight))
    transposed = layer.op_type == "Gemm" and bool(layer.attributes.get_int("transB", 0))
    axis = 0 if layer.op_type == "Conv" or transposed else 1
    along = [-1 if place == axis else 1 for place in range(rank)]
    return op.Reshape(vector, along)
