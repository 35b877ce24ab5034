"""The `refresh` program: from float parameters to the derived tensors of `predict`.

For a float `predict` the derived tensors are the parameters themselves. For a quantized one they are the integer
weights, their scales, the integer biases and theirs; the activations' scales stay as calibrated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
import onnx_ir as ir

from archipel.bundle import Program
from archipel.bundle.roles import Derived, DType, Parameter, State
from archipel.errors import CompressionError
from archipel.graph import Builder, Model
from archipel.graph.opset import IR_VERSION, OPSET

_INT8_LARGEST = 127.0
_INT32_LARGEST = 2147483520.0  # the largest float32 that still fits into int32


@dataclass(frozen=True)
class _Quantized:
    """An integer initializer of the quantized graph: its value, its scale's and the channel axis (None: per tensor)."""

    content: ir.Value
    scale: ir.Value
    axis: int | None


def refresh_program(
    predict: Model, parameters: Mapping[str, np.ndarray], statistics: Mapping[str, State] | None = None
) -> Model:
    """A Model with the signature of `refresh`: `parameters` -> every initializer of `predict` that derives from them.

    `statistics` is state that `predict` has as initializers, by their names: running averages, which training moves.

    Recognizes parameters that `predict` holds as they are, and those that `quantize_static` replaced: symmetric int8
    weights, and int32 biases with the product of input and weight scale. Raises CompressionError when a parameter of
    float32 is in neither form.
    """
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="refresh")
    op = Builder(graph, scope="refresh")
    weights = predict.ir.graph.initializers
    inputs: list[Parameter | State] = []
    outputs: list[Derived] = []
    sources: dict[str, ir.Value] = {}
    for name, array in parameters.items():
        sources[name] = op.input(name, ir.DataType.FLOAT, array.shape)
        inputs.append(Parameter(name=name, tensor=name, dtype="float32", shape=array.shape))

    for name, state in (statistics or {}).items():
        sources[name] = op.input(state.name, ir.DataType.FLOAT, [int(d) for d in state.shape])
        inputs.append(state)

    def derive(value: ir.Value, tensor: str) -> None:
        out = op.name_output(value, f"{tensor}.next")
        content = weights[tensor].const_value
        if content is None:
            raise CompressionError(f"predict: initializer {tensor!r} has no value")
        shape = tuple(int(d) for d in content.shape.numpy())
        dtype = cast(DType, content.dtype.numpy().name)
        outputs.append(Derived(name=out.name or "", tensor=tensor, dtype=dtype, shape=shape))

    quantized = {name: found for name in parameters if (found := _find(predict, name)) is not None}
    scales: dict[str, ir.Value] = {}
    for name, source in sources.items():
        if name in weights:
            derive(source, name)
        elif name not in quantized:
            raise CompressionError(f"refresh: parameter {name!r} is not in the predict graph, neither float nor int8")
        elif quantized[name].content.dtype == ir.DataType.INT8:
            found = quantized[name]
            scale = _weight_scale(op, source, found.axis, len(parameters[name].shape))
            scales[_name(found.scale)] = scale
            derive(_quantize_weight(op, source, scale, found.axis), _name(found.content))
            derive(scale, _name(found.scale))
    for name, source in sources.items():
        if name in quantized and quantized[name].content.dtype == ir.DataType.INT32:
            scale = op.Mul(*_bias_factors(op, predict, name, quantized[name], scales))
            # In float64, as float32 cannot hold every int32; ties go to even as in QuantizeLinear.
            exact = op.Round(op.Div(op.Cast(source, to=11), op.Cast(scale, to=11)))
            bounded = op.Clip(exact, np.array(-_INT32_LARGEST), np.array(_INT32_LARGEST))
            derive(op.Cast(bounded, to=6), _name(quantized[name].content))
            derive(scale, _name(quantized[name].scale))
    model = ir.Model(graph, ir_version=IR_VERSION)
    return Model(
        model, signature=Program(kind="refresh", inputs=tuple(inputs), outputs=tuple(outputs)), initial=dict(parameters)
    )


def _find(predict: Model, parameter: str) -> _Quantized | None:
    content = predict.ir.graph.initializers.get(f"{parameter}_quantized")
    if content is None:
        return None
    for node in content.consumers():
        if node.op_type == "DequantizeLinear":
            scale = node.inputs[1]
            if scale is None or scale.const_value is None:
                raise CompressionError(f"refresh: the scale of {parameter!r} is not a constant")
            per_channel = scale.const_value.size > 1 or len(scale.const_value.shape) > 0
            axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 1
            return _Quantized(content, scale, axis if per_channel else None)
    return None


def _weight_scale(op: Builder, weight: ir.Value, axis: int | None, rank: int) -> ir.Value:
    axes = [i for i in range(rank) if axis is None or i != axis % rank]
    largest = op.ReduceMax(op.Abs(weight), np.array(axes, np.int64), keepdims=0)
    # A channel of zeros has no scale of its own; any positive number quantizes it to zeros.
    scale: ir.Value = op.Where(op.Greater(largest, 0.0), op.Div(largest, _INT8_LARGEST), np.array(1.0, np.float32))
    return scale


def _quantize_weight(op: Builder, weight: ir.Value, scale: ir.Value, axis: int | None) -> ir.Value:
    if axis is None:
        result: ir.Value = op.QuantizeLinear(weight, scale, np.array(0, np.int8))
    else:
        shape = scale.shape
        if shape is None:
            raise CompressionError("refresh: a weight scale without a shape")
        zeros = np.zeros([int(d) for d in shape], np.int8)  # type: ignore[arg-type]
        result = op.QuantizeLinear(weight, scale, zeros, axis=axis)
    return result


def _bias_factors(
    op: Builder, predict: Model, name: str, bias: _Quantized, scales: Mapping[str, ir.Value]
) -> tuple[ir.Value, ir.Value]:
    """The scales of the input and the weight of the node that adds this bias."""
    dequantize = next(node for node in bias.content.consumers() if node.op_type == "DequantizeLinear")
    consumers = dequantize.outputs[0].consumers()
    for node in consumers:
        if node.op_type in ("Conv", "Gemm", "ConvTranspose") and len(node.inputs) == 3:
            activation, weight = (_dequantize_scale(node, i) for i in (0, 1))
            if activation.const_value is None or _name(weight) not in scales:
                break
            return op.constant(activation.const_value.numpy()), scales[_name(weight)]
    raise CompressionError(f"refresh: bias {name!r} is not the third input of a quantized Conv or Gemm")


def _dequantize_scale(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    producer = value.producer() if value is not None else None
    scale = producer.inputs[1] if producer is not None and producer.op_type == "DequantizeLinear" else None
    if scale is None:
        raise CompressionError(f"refresh: input {index} of {node.op_type} {node.name!r} is not quantized")
    return scale


def _name(value: ir.Value) -> str:
    return value.name or ""
