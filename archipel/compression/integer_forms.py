"""From simulated quantization to operators that runtimes are fast with: integer biases and products, packed weights.

The simulation is `QuantizeLinear -> DequantizeLinear` on float tensors. Here other operators take over the computation
of the same numbers, up to the rounding of float32.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import onnx_ir as ir

from archipel.graph import Builder
from archipel.graph.passes.constants import UNPACK
from archipel.graph.shapes import Dim, dims, rank
from archipel.graph.walk import only_reader

LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
INT32_LARGEST = 2147483520.0  # the largest float32 that still fits into int32
_INT4 = (ir.DataType.INT4, ir.DataType.UINT4)


def use_integer_forms(model: ir.Model, constants: Collection[ir.Value]) -> None:
    """Change the graph as the module says. `constants` are the values that no input changes."""
    op = Builder(model.graph, scope="integer")
    for node in list(model.graph):
        if node.domain != "" or node.op_type not in LAYERS:
            continue
        # A layer is quantized if a DequantizeLinear is in front of both factors.
        data, weight = _dequantize(node.inputs[0]), _dequantize(node.inputs[1])
        source = None if data is None else data.inputs[0]
        dynamic = None if source is None else source.producer()
        if dynamic is not None and dynamic.op_type == "DynamicQuantizeLinear":
            if weight is not None and data is not None:
                _multiply_integers(op, node, dynamic, weight)
        elif data is not None and weight is not None and len(node.inputs) > 2 and node.inputs[2] in constants:
            _quantize_bias(op, node, data, weight)
    for node in list(model.graph):
        # After the layers: a weight that an integer kernel multiplies with stays behind its DequantizeLinear.
        if _is_stored(node, constants) and not any(_computes_integers(use.node) for use in node.outputs[0].uses()):
            _pack(op, node)
    for node in list(model.graph):
        if node.op_type == "MaxPool" and node.domain == "":
            _pool_in_float(op, node)


def _pool_in_float(op: Builder, pool: ir.Node) -> None:
    """Change float -> Relu -> MaxPool -> QuantizeLinear to float -> MaxPool -> Relu -> QuantizeLinear: equal results.

    Otherwise ONNX Runtime rounds before the pooling, and its MaxPool of integers takes three times as long.
    """
    relu = None if pool.inputs[0] is None else pool.inputs[0].producer()
    if relu is None or relu.op_type != "Relu" or only_reader(relu.outputs[0]) is None or len(pool.outputs) > 1:
        return
    data, result = relu.inputs[0], pool.outputs[0]
    layer = None if data is None else data.producer()
    # For float layers only: behind an integer layer the rounding must come first, to be part of its kernel.
    if layer is None or _computes_integers(layer):
        return
    if any(use.node.op_type != "QuantizeLinear" for use in result.uses()) or result.is_graph_output():
        return
    with op.before(pool):
        pooled = op.MaxPool(data, **{name: attribute.value for name, attribute in pool.attributes.items()})
        moved = op.Relu(pooled)
    moved.name, result.name = result.name, op.unique(f"{result.name}/before")
    result.replace_all_uses_with(moved)


def _dequantize(value: ir.Value | None) -> ir.Node | None:
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == "DequantizeLinear" and node.domain == "" else None


def _quantize(node: ir.Node) -> ir.Node | None:
    source = node.inputs[0]
    quantizer = None if source is None else source.producer()
    return quantizer if quantizer is not None and quantizer.op_type == "QuantizeLinear" else None


def _is_stored(node: ir.Node, constants: Collection[ir.Value]) -> bool:
    """Whether the node dequantizes a rounded constant."""
    return (
        node.op_type == "DequantizeLinear"
        and node.domain == ""
        and node.inputs[0] in constants
        and _quantize(node) is not None
    )


def _computes_integers(node: ir.Node) -> bool:
    """Whether a runtime has an integer kernel for this layer: both factors are quantized."""
    return node.op_type in LAYERS and all(_dequantize(value) is not None for value in node.inputs[:2])


def _quantize_bias(op: Builder, node: ir.Node, data: ir.Node, weight: ir.Node) -> None:
    """The bias as int32 with the product of the two scales, as integer kernels add it.

    ONNX has no QuantizeLinear to int32, so this writes its arithmetic: in float64, as float32 cannot hold every int32,
    with ties to even.
    """
    bias, weight_scale, data_scale = node.inputs[2], weight.inputs[1], data.inputs[1]
    with op.before(node):
        scale = op.Mul(weight_scale, data_scale)
        exact = op.Round(op.Div(op.Cast(bias, to=11), op.Cast(scale, to=11)))
        bounded = op.Clip(exact, np.array(-INT32_LARGEST), np.array(INT32_LARGEST))
        axis = 0 if rank(scale) else None
        # Devices compute this product once when they open the graph, from scales that are stored anyway. Its factors
        # are in the other order, or it would be merged with `scale`, which is not stored.
        product = op.Mul(data_scale, weight_scale)
        _mark(product, {weight_scale, data_scale})
        node.replace_input_with(2, op.DequantizeLinear(op.Cast(bounded, to=6), product, axis=axis))


def _multiply_integers(op: Builder, node: ir.Node, dynamic: ir.Node, weight: ir.Node) -> None:
    """MatMulInteger or ConvInteger of both quantized factors, times the product of the scales, plus the bias."""
    flipped = node.op_type == "Gemm" and bool(node.attributes.get_int("transB", 0))
    alpha = node.attributes.get_float("alpha", 1.0) if node.op_type == "Gemm" else 1.0
    with op.before(node):
        integers, factor = weight.inputs[0], op.Mul(dynamic.outputs[1], weight.inputs[1])
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        if flipped:
            integers = op.Transpose(integers, perm=[1, 0])
        if node.op_type == "Conv":
            kept = {name: attribute.value for name, attribute in node.attributes.items()}
            # int32 sums; the zero point of the data goes to the kernel, the weights have none.
            product = op.ConvInteger(dynamic.outputs[0], integers, dynamic.outputs[2], **kept)
            channels = [1, -1, *[1] * (rank(weight.outputs[0]) - 2)]
            factor = op.Reshape(factor, channels) if rank(factor) else factor
            bias = None if bias is None else op.Reshape(bias, channels)
        else:
            product = op.MatMulInteger(dynamic.outputs[0], integers, dynamic.outputs[2])
            factor = factor if alpha == 1.0 else op.Mul(factor, alpha)
        result = op.Mul(op.Cast(product, to=1), factor)
        if bias is not None:
            result = op.Add(result, bias)
    _replace(op, node, result)


def _pack(op: Builder, node: ir.Node) -> None:
    """Replace a DequantizeLinear, which would run with every prediction, by a product of stored integers and scales.

    Runtimes compute that once when they open the graph. Two integers of 4 bits share a byte.
    """
    quantize = _quantize(node)
    if quantize is None:
        return
    scale, shape, axis = node.inputs[1], dims(node.outputs[0]), node.attributes.get_int("axis", 1)
    block = node.attributes.get_int("block_size", 0)
    with op.before(node):
        stored = quantize.outputs[0]
        integers = stored
        if stored is not None and stored.dtype in _INT4:
            # ONNX Runtime returns no tensors of 4 bits, so `deploy` could not store them: round to int8.
            wide = op.QuantizeLinear(
                quantize.inputs[0], scale, axis=axis, block_size=block or None, output_dtype=int(ir.DataType.INT8)
            )
            stored = _pack_nibbles(op, op.Clip(wide, np.array(-8, np.int8), np.array(7, np.int8)), shape)
            integers = _unpack_nibbles(op, stored, shape)
        result = op.Mul(op.Cast(integers, to=1), _spread(op, scale, shape, axis, block))
    _mark(result, {stored, scale})
    _replace(op, node, result)


def _pack_nibbles(op: Builder, integers: ir.Value, shape: Sequence[Dim]) -> ir.Value:
    """int8 from -8 to 7 -> uint8, half as many, rounded up: the first half in the low bits, the rest in the high."""
    count = math.prod(int(d) for d in shape if d is not None)
    half = (count + 1) // 2
    shifted = op.Reshape(op.Cast(op.Add(op.Cast(integers, to=6), np.array(8, np.int32)), to=2), [-1])
    low, high = op.Slice(shifted, [0], [half], [0]), op.Slice(shifted, [half], [count], [0])
    if count % 2:
        high = op.Concat(high, np.zeros(1, np.uint8), axis=0)
    return op.BitwiseOr(low, op.BitShift(high, np.array(4, np.uint8), direction="LEFT"))


def _unpack_nibbles(op: Builder, packed: ir.Value, shape: Sequence[Dim]) -> ir.Value:
    count = math.prod(int(d) for d in shape if d is not None)
    low = op.BitwiseAnd(packed, np.array(15, np.uint8))
    high = op.BitShift(packed, np.array(4, np.uint8), direction="RIGHT")
    both = op.Concat(low, high, axis=0)
    if count % 2:
        both = op.Slice(both, [0], [count], [0])
    return op.Reshape(op.Sub(op.Cast(both, to=6), np.array(8, np.int32)), [int(d) for d in shape if d])


def _spread(op: Builder, scale: ir.Value | None, shape: Sequence[Dim], axis: int, block: int) -> ir.Value | None:
    """The scale in a shape that broadcasts against the integers."""
    if scale is None or rank(scale) == 0:
        return scale
    axis %= len(shape)
    if not block:
        return op.Reshape(scale, [-1 if i == axis else 1 for i in range(len(shape))])
    size = shape[axis]
    # The runtime computes the block of each index: as a stored constant they can be larger than the weight.
    places = op.Range(np.array(0), np.array(size if isinstance(size, int) else 0), np.array(1))
    return op.Gather(scale, op.Div(places, np.array(block)), axis=axis)


def _mark(value: ir.Value, stops: Collection[ir.Value | None]) -> None:
    """Mark the nodes from `stops`, which are stored, to `value`: devices run them when they open the graph."""
    node = None if value in stops else value.producer()
    if node is not None:
        node.metadata_props[UNPACK] = ""
        for source in node.inputs:
            if source is not None:
                _mark(source, stops)


def _replace(op: Builder, node: ir.Node, result: ir.Value) -> None:
    """Let all readers of the node read `result`; a graph output keeps its name."""
    old = node.outputs[0]
    if result.shape is None:
        result.shape = old.shape
    if old.is_graph_output():
        old.name, result.name = op.unique(f"{old.name}/simulated"), old.name
    old.replace_all_uses_with(result, replace_graph_outputs=True)
