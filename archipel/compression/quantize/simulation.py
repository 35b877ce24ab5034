"""Write static rounding into a graph: activations have fixed scales, the graph computes those of weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from archipel.compression.compressed import CompressedModel
from archipel.compression.deploy import constants
from archipel.compression.integer_forms import INT32_LARGEST
from archipel.compression.quantize.placement import PASSED, Layer, Placement, place
from archipel.compression.quantize.ranges import Kind, Range
from archipel.graph import Builder
from archipel.graph.functions import inline_functions
from archipel.graph.shapes import dims, rank
from archipel.training.batch_norm import prepared
from archipel.training.folding import fold_batch_norm_symbolic

SCALE, ZERO_POINT = ".scale", ".zero_point"

Switch = Callable[[Builder, str, ir.Value, ir.Value], ir.Value]
"""(builder, name of what is rounded, the exact value, the rounded one) -> the value that is read instead."""


@dataclass(frozen=True)
class Scheme:
    """`levels` is the largest integer of a weight: 127, or 63 where products of 8 by 8 bits must fit into 15."""

    kind: Kind = "uint8"
    per_channel: bool = True
    levels: int = 127


@dataclass(frozen=True)
class Calibrated:
    """The results of calibration: ranges by value, and by layer (`Layer.key`) the factor of its weight's scale
    (`ratios`, [channels] or []) and what is added to its bias (`corrections`, [channels])."""

    ranges: Mapping[str, Range]
    ratios: Mapping[str, np.ndarray] = field(default_factory=dict)
    corrections: Mapping[str, np.ndarray] = field(default_factory=dict)


def float_form(model: CompressedModel) -> ir.Model:
    """The graph that rounding is written into: in inference mode, BatchNormalization folded as nodes."""
    work = prepared(model, "frozen").ir
    inline_functions(work)
    fold_batch_norm_symbolic(work)
    return work


def simulate(
    source: ir.Model,
    scheme: Scheme,
    calibrated: Calibrated,
    exclude: Collection[str] = (),
    switch: Switch | None = None,
) -> tuple[ir.Model, Placement]:
    """A copy of `source` (see `float_form`) that rounds, and its placement. `switch` may turn each rounding off."""
    work = source.clone()
    graph = work.graph
    placement = place(graph, constants(graph), exclude, signed=scheme.kind == "int8")
    op = Builder(graph, scope="int8")
    # Biases first: the scale of a weight depends on the corrected bias (`_least_scale`).
    for layer in placement.layers:
        if layer.key in calibrated.corrections:
            _correct(op, layer, calibrated.corrections[layer.key])
    scales = _round_activations(op, placement, calibrated.ranges, scheme.kind, switch)
    for layer in placement.layers:
        if layer.axis is not None:
            _round_weight(op, layer, scheme, scales, calibrated.ratios.get(layer.key), switch)
    return work, placement


def correctable(layer: Layer) -> bool:
    """Whether the layer can have a bias: its own, or that of an Add behind a MatMul."""
    return layer.axis is not None and (layer.node.op_type != "MatMul" or _addition(layer.node) is not None)


def _correct(op: Builder, layer: Layer, correction: np.ndarray) -> None:
    """Add to the layer's bias."""
    node, index = layer.node, 2
    if node.op_type == "MatMul":
        addition = _addition(node)
        if addition is None:
            return
        node, index = addition
    node.resize_inputs(max(len(node.inputs), index + 1))
    bias = node.inputs[index]
    constant = op.initializer(f"{layer.key}.bias_correction", correction.astype(np.float32))
    with op.before(node):
        node.replace_input_with(index, constant if bias is None else op.Add(bias, constant))


def _addition(node: ir.Node) -> tuple[ir.Node, int] | None:
    """The Add of a bias behind a MatMul, and the index of the bias among its inputs."""
    uses = list(node.outputs[0].uses())
    if len(uses) != 1 or uses[0].node.op_type != "Add" or uses[0].node.domain != "":
        return None
    index = 1 - uses[0].idx
    bias = uses[0].node.inputs[index]
    last = dims(node.outputs[0])[-1]
    return (uses[0].node, index) if bias is not None and bias.is_initializer() and dims(bias) == (last,) else None


def _round_activations(
    op: Builder, placement: Placement, ranges: Mapping[str, Range], kind: Kind, switch: Switch | None
) -> dict[ir.Value, ir.Value]:
    """Insert the rounding. Returns the scale of each rounded value."""
    scales: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
    scale_of: dict[ir.Value, ir.Value] = {}
    for value in [*placement.rounded, *placement.sharing]:
        source = value
        # A value may share with a value that shares: the first one of the chain has the scale.
        while source in placement.sharing:
            source = placement.sharing[source]
        if source not in scales:
            scale, zero = ranges[str(source.name)].grid(kind)
            name = str(source.name)
            scales[source] = op.initializer(name + SCALE, scale), op.initializer(name + ZERO_POINT, zero)
        scale_value, zero_value = scales[source]
        node = value.producer()
        with op.after(node) if node is not None else op.before(op.graph[0]):
            integers = op.QuantizeLinear(value, scale_value, zero_value)
            result = op.DequantizeLinear(integers, scale_value, zero_value)
            if switch is not None:
                result = switch(op, str(value.name), value, result)
        own_nodes = {integers.producer(), result.producer()}
        result.shape = value.shape
        # A graph output is no use of the value, so the replacement below would miss it (see PASSED).
        if value.is_graph_output() and kind == "int8" and node is not None and node.op_type in PASSED:
            _hand_out(op.graph, value, result)
        # All readers change to the rounded value, but not the nodes of the rounding itself.
        for use in list(value.uses()):
            if use.node not in own_nodes:
                use.node.replace_input_with(use.idx, result)
        scale_of[result] = scale_value
    return scale_of


def _hand_out(graph: ir.Graph, value: ir.Value, result: ir.Value) -> None:
    """Make `result` the graph output that `value` is, under its name."""
    name, value.name = value.name, f"{value.name}.exact"
    result.name, result.type = name, value.type
    graph.outputs[list(graph.outputs).index(value)] = result


def _round_weight(
    op: Builder,
    layer: Layer,
    scheme: Scheme,
    scales: Mapping[ir.Value, ir.Value],
    ratio: np.ndarray | None,
    switch: Switch | None,
) -> None:
    node, weight, axis = layer.node, layer.node.inputs[1], layer.axis
    if weight is None or axis is None:
        return
    scale_axis = axis if scheme.per_channel else None
    with op.before(node):
        scale = weight_scale(op, weight, scale_axis, scheme.levels)
        if ratio is not None:
            scale = op.Mul(scale, op.initializer(f"{layer.key}.weight_ratio", ratio.astype(np.float32)))
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        # Without a rounded input there is no integer bias, and no bound.
        data_scale = scales.get(node.inputs[0]) if node.inputs[0] is not None else None
        if bias is not None and data_scale is not None:
            # The bias becomes int32 in the scale (weight * data): a tiny weight scale would make it overflow.
            scale = op.Max(scale, _least_scale(op, bias, data_scale, scheme.per_channel))
        # Weights are symmetric: the zero point is 0.
        zero = np.zeros([d for d in dims(scale) if isinstance(d, int)], np.int8)
        rounded = op.DequantizeLinear(
            op.QuantizeLinear(weight, scale, zero, axis=scale_axis), scale, zero, axis=scale_axis
        )
        if switch is not None:
            rounded = switch(op, layer.key, weight, rounded)
        node.replace_input_with(1, rounded)


def weight_scale(op: Builder, weight: ir.Value, axis: int | None, levels: int) -> ir.Value:
    """max |weight| / levels over all axes but `axis`: [channels], or [] for None."""
    axes = [i for i in range(rank(weight)) if i != axis]
    largest = op.ReduceMax(op.Abs(weight), np.array(axes, np.int64), keepdims=0)
    # A channel of zeros would get the scale 0, and divide by it; any positive scale rounds it to zeros.
    return op.Where(op.Greater(largest, 0.0), op.Div(largest, float(levels)), np.array(1.0, np.float32))


def _least_scale(op: Builder, bias: ir.Value, data_scale: ir.Value, per_channel: bool) -> ir.Value:
    """The weight scale below which the bias would not fit into int32, as in channels with tiny weights."""
    least = op.Div(op.Mul(op.Abs(bias), 1.0001 / INT32_LARGEST), data_scale)
    return least if per_channel else op.ReduceMax(least, keepdims=0)
