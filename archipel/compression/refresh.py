"""The `refresh` program: from float parameters to the derived tensors of `predict`.

For a float `predict` the derived tensors are the parameters themselves. For a quantized one they are the integers,
their scales and zero points, of what BatchNormalization left behind in the layer before it; the activations' scales
stay as calibrated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
import onnx_ir as ir

from archipel.bundle import Program
from archipel.bundle.roles import Derived, DType, Parameter, State
from archipel.errors import CompressionError
from archipel.graph import Builder, Model
from archipel.graph.opset import IR_VERSION, OPSET
from archipel.graph.shapes import constant_array, dims, rank
from archipel.training.batch_norm import prepared
from archipel.training.folding import fold_batch_norm

_INT8_LARGEST = 127.0
_INT32_LARGEST = 2147483520.0  # the largest float32 that still fits into int32
_SUFFIX = "_quantized"
_LAYERS = ("Conv", "ConvTranspose", "Gemm")


@dataclass(frozen=True)
class _Quantized:
    """An integer initializer of the quantized graph and what dequantizes it: scale, zero point, channel axis.

    No axis: one scale for the whole tensor."""

    content: ir.Value
    scale: ir.Value
    zero_point: ir.Value | None
    axis: int | None

    @property
    def tensor(self) -> str:
        """The float tensor that was quantized."""
        return _name(self.content).removesuffix(_SUFFIX)


@dataclass(frozen=True)
class _Layer:
    """A layer that adds an int32 bias, whose scale is that of the input times that of the weight."""

    input_scale: np.ndarray
    weight: _Quantized
    bias: _Quantized


def refresh_program(
    predict: Model,
    parameters: Mapping[str, np.ndarray],
    statistics: Mapping[str, State] | None = None,
    source: Model | None = None,
) -> Model:
    """A Model with the signature of `refresh`: `parameters` -> every initializer of `predict` that derives from them.

    `statistics` is state that `predict` has as initializers, by their names: running averages, which training moves.
    `source` is the model that `predict` was quantized from; it says which layers took over a BatchNormalization.

    Recognizes parameters that `predict` holds as they are, and those that `quantize_static` replaced: symmetric int8
    weights, int32 biases with the product of input and weight scale, and uint8 tensors with a zero point. Raises
    CompressionError when a parameter is in none of these forms.
    """
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="refresh")
    op = Builder(graph, scope="refresh")
    weights = predict.ir.graph.initializers
    inputs: list[Parameter | State] = []
    outputs: list[Derived] = []
    sources: dict[str, ir.Value] = {}
    for name, array in parameters.items():
        dtype = ir.DataType.from_numpy(array.dtype)
        sources[name] = op.input(name, dtype, array.shape)
        inputs.append(Parameter(name=name, tensor=name, dtype=cast(DType, array.dtype.name), shape=array.shape))
    for name, state in (statistics or {}).items():
        dtype = ir.DataType.from_numpy(np.dtype(state.dtype))
        sources[name] = op.input(state.name, dtype, [int(d) for d in state.shape])
        inputs.append(state)
    taken = set() if source is None else _fold(op, source, sources)

    def derive(value: ir.Value, target: ir.Value | None) -> None:
        if target is None:
            return
        content = constant_array(target)
        if content is None:
            raise CompressionError(f"predict: initializer {target.name!r} has no value")
        tensor = _name(target)
        out = op.name_output(value, f"{tensor}.next")
        dtype = cast(DType, content.dtype.name)
        outputs.append(Derived(name=_name(out), tensor=tensor, dtype=dtype, shape=content.shape))

    layers = list(_layers(predict))
    biases = {layer.bias.tensor for layer in layers}
    scales: dict[str, ir.Value] = {}
    for name, value in sources.items():
        found = _find(predict, name)
        if name in weights:
            derive(value, weights[name])
        elif found is None:
            if name not in taken:
                raise CompressionError(
                    f"refresh: parameter {name!r} is not in the predict graph, neither float nor int8"
                )
        elif found.content.dtype == ir.DataType.INT8:
            scale = scales[name] = _weight_scale(op, value, found.axis)
            for layer in layers:
                if layer.weight.content is found.content:
                    scale = scales[name] = op.Max(scale, _least_scale(op, layer, _bias(op, layer, sources)))
            derive(_quantize_weight(op, value, scale, found.axis), found.content)
            derive(scale, found.scale)
        elif found.content.dtype == ir.DataType.UINT8:
            results = op.DynamicQuantizeLinear(value, _outputs=3)
            for result, target in zip(results, (found.content, found.scale, found.zero_point)):
                derive(op.reshape_like(result, target) if target is not None else result, target)
        elif name not in biases:
            raise CompressionError(f"refresh: bias {name!r} is not the third input of a quantized Conv or Gemm")
    for layer in layers:
        if layer.weight.tensor in scales or layer.bias.tensor in sources:
            weight_scale = scales.get(layer.weight.tensor)
            if weight_scale is None:
                weight_scale = op.constant(constant_array(layer.weight.scale))
            scale = op.Mul(weight_scale, layer.input_scale)
            # In float64, as float32 cannot hold every int32; ties go to even as in QuantizeLinear.
            exact = op.Round(op.Div(op.Cast(_bias(op, layer, sources), to=11), op.Cast(scale, to=11)))
            bounded = op.Clip(exact, np.array(-_INT32_LARGEST), np.array(_INT32_LARGEST))
            derive(op.Cast(bounded, to=6), layer.bias.content)
            derive(scale, layer.bias.scale)
    model = ir.Model(graph, ir_version=IR_VERSION)
    return Model(
        model, signature=Program(kind="refresh", inputs=tuple(inputs), outputs=tuple(outputs)), initial=dict(parameters)
    )


def _fold(op: Builder, source: Model, sources: dict[str, ir.Value]) -> set[str]:
    """Replace what moves in `sources` by what BatchNormalization makes of it. Returns the names that went into that."""
    taken: set[str] = set()
    for fold in fold_batch_norm(prepared(source, "frozen").ir):
        if not sources.keys().isdisjoint(fold.values):
            constants = {name: op.constant(content) for name, content in fold.values.items() if name not in sources}
            sources.update(fold.emit(op, {**sources, **constants}.__getitem__))
            taken.update(fold.values)
    return taken


def _layers(predict: Model) -> Iterator[_Layer]:
    for node in predict.ir.graph:
        if node.op_type in _LAYERS and node.domain == "" and len(node.inputs) == 3:
            activation, weight, bias = (None if value is None else value.producer() for value in node.inputs)
            added = _quantized(bias)
            if added is None:
                continue
            scale = None if activation is None else constant_array(activation.inputs[1])
            multiplied = _quantized(weight)
            if scale is None or multiplied is None or activation is None or activation.op_type != "DequantizeLinear":
                raise CompressionError(
                    f"refresh: {node.op_type} {node.name!r} has a quantized bias, but its input or weight has no "
                    "constant scale"
                )
            yield _Layer(scale, multiplied, added)


def _find(predict: Model, tensor: str) -> _Quantized | None:
    content = predict.ir.graph.initializers.get(tensor + _SUFFIX)
    nodes = [] if content is None else [node for node in content.consumers() if node.op_type == "DequantizeLinear"]
    return _quantized(nodes[0]) if nodes else None


def _quantized(dequantize: ir.Node | None) -> _Quantized | None:
    if dequantize is None or dequantize.op_type != "DequantizeLinear":
        return None
    content, scale, *rest = dequantize.inputs
    if content is None or scale is None or not content.is_initializer() or not scale.is_initializer():
        return None
    axis = dequantize.attributes.get_int("axis", 1) if rank(scale) else None
    return _Quantized(content, scale, rest[0] if rest else None, axis)


def _weight_scale(op: Builder, weight: ir.Value, axis: int | None) -> ir.Value:
    axes = [i for i in range(rank(weight)) if axis is None or i != axis % rank(weight)]
    largest = op.ReduceMax(op.Abs(weight), np.array(axes, np.int64), keepdims=0)
    # A channel of zeros has no scale of its own; any positive number quantizes it to zeros.
    scale: ir.Value = op.Where(op.Greater(largest, 0.0), op.Div(largest, _INT8_LARGEST), np.array(1.0, np.float32))
    return scale


def _least_scale(op: Builder, layer: _Layer, bias: ir.Value) -> ir.Value:
    """The scale of the weight below which the bias would not fit into int32: channels that hardly count have one."""
    factor = 1.0001 / _INT32_LARGEST / layer.input_scale.astype(np.float64)
    least: ir.Value = op.Mul(op.Abs(bias), np.asarray(factor, np.float32))
    return least if layer.weight.axis is not None else op.ReduceMax(least, keepdims=0)


def _quantize_weight(op: Builder, weight: ir.Value, scale: ir.Value, axis: int | None) -> ir.Value:
    if axis is None:
        result: ir.Value = op.QuantizeLinear(weight, scale, np.array(0, np.int8))
    else:
        zeros = np.zeros([d for d in dims(scale) if isinstance(d, int)], np.int8)
        result = op.QuantizeLinear(weight, scale, zeros, axis=axis)
    return result


def _bias(op: Builder, layer: _Layer, sources: Mapping[str, ir.Value]) -> ir.Value:
    """The layer's bias in float: also one that does not move has to follow the scale of a weight that does."""
    found = sources.get(layer.bias.tensor)
    if found is not None:
        return found
    integers, scale = constant_array(layer.bias.content), constant_array(layer.bias.scale)
    if integers is None or scale is None:
        raise CompressionError(f"refresh: the bias {layer.bias.tensor!r} is not a constant")
    return op.constant((integers * scale.astype(np.float64)).astype(np.float32))


def _name(value: ir.Value) -> str:
    return value.name or ""
