"""Dynamic int8: weights are rounded once, activations at run time with the range of each batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx_ir as ir

from archipel.compression.compressed import CompressedModel
from archipel.compression.deploy import constants
from archipel.compression.part import Need
from archipel.compression.quantize.placement import Layer, layers
from archipel.compression.quantize.simulation import float_form, weight_scale
from archipel.errors import CompressionError
from archipel.graph import Builder, Model
from archipel.graph.shapes import dims

if TYPE_CHECKING:
    from archipel.compression.work import Work


@dataclass(frozen=True)
class DynamicInt8:
    """int8 weights, and activations that are rounded to uint8 by their own range: needs no calibration data.

    A Gemm or MatMul becomes MatMulInteger behind a DynamicQuantizeLinear. Finding the range costs a pass over the
    activations, so it pays where weights are large against them. One range serves for the whole batch.

    Arguments:
        per_channel: one scale for each output channel of a weight, else one for the weight.
        convolutions: a Conv becomes ConvInteger too: as small as in `StaticInt8`, but ONNX Runtime's kernel of it is
            slow (measured: 6 to 40 times as slow as the float Conv in small networks).
        exclude: globs of names of weights whose layers stay in float.

    Raises CompressionError from `apply` where the model has no such layer, or is quantized already.

    Example:
        small, report = archipel.compress(model, [DynamicInt8()])
    """

    per_channel: bool = True
    convolutions: bool = False
    exclude: tuple[str, ...] = ()

    @property
    def needs(self) -> tuple[Need, ...]:
        return ()

    def apply(self, model: CompressedModel, work: Work) -> CompressedModel:
        if model.training_form is not None:
            raise CompressionError(
                "DynamicInt8: the model is quantized already; quantize once, as the last step of a recipe"
            )
        simulated = float_form(model)
        graph = simulated.graph
        kinds = ("Conv", "Gemm", "MatMul") if self.convolutions else ("Gemm", "MatMul")
        candidates = layers(graph, constants(graph), self.exclude)
        chosen = [layer for layer in candidates if layer.node.op_type in kinds and _has_integer_form(layer)]
        if not chosen:
            hint = "" if self.convolutions else "; convolutions=True takes Conv as well, StaticInt8 makes it quick"
            raise CompressionError(f"DynamicInt8: the model has no {' or '.join(kinds)} to quantize{hint}")
        op = Builder(graph, scope="int8")
        # Layers that read the same value share its rounding.
        rounded_inputs: dict[ir.Value, ir.Value] = {}
        for layer in chosen:
            _round(op, layer, self.per_channel, rounded_inputs)
        work.note(layers=[layer.name for layer in chosen])
        return CompressedModel(simulated, training_form=Model(model.copy().ir))


def _has_integer_form(layer: Layer) -> bool:
    node = layer.node
    # A product of two activations has no weight to store in int8.
    if layer.axis is None:
        return False
    # MatMulInteger has no factors and no transposition of its data.
    if node.op_type == "Gemm":
        factors = [node.attributes.get_float(name, 1.0) for name in ("alpha", "beta")]
        return factors == [1.0, 1.0] and not node.attributes.get_int("transA", 0)
    return True


def _round(op: Builder, layer: Layer, per_channel: bool, rounded_inputs: dict[ir.Value, ir.Value]) -> None:
    node, (data, weight) = layer.node, layer.node.inputs[:2]
    if data is None or weight is None:
        return
    with op.before(node):
        if data not in rounded_inputs:
            integers, scale, zero = op.emit("DynamicQuantizeLinear", data, outputs=3)
            rounded_inputs[data] = op.DequantizeLinear(integers, scale, zero)
            rounded_inputs[data].shape = data.shape
        axis = layer.axis if per_channel else None
        scale = weight_scale(op, weight, axis, 127)
        rounded = op.QuantizeLinear(weight, scale, axis=axis, output_dtype=int(ir.DataType.INT8))
        rounded = op.DequantizeLinear(rounded, scale, axis=axis)
        rounded.shape = ir.Shape(dims(weight))
    node.replace_input_with(0, rounded_inputs[data])
    node.replace_input_with(1, rounded)
