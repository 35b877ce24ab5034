"""Cross-layer equalization: channels of neighbouring layers made equally large (Nagel et al. 2019, section 4.1).

Where only Relu, or another operator that commutes with a positive factor, lies between two layers, the first can divide
channel i by s_i and the second multiply with s_i: the network computes the same. With s_i = sqrt(r1_i / r2_i), where r1
and r2 are the channel's largest weights in both layers, both become sqrt(r1_i r2_i).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from archipel.autodiff.rules.normalization import EPSILON
from archipel.compression.compressed import CompressedModel
from archipel.compression.examples import Examples, fixed_batch
from archipel.compression.layer_weights import find_mask
from archipel.compression.score import open_session
from archipel.graph import Builder, Model
from archipel.graph.shapes import constant_array, dims
from archipel.graph.walk import only_reader
from archipel.training.batch_norm import prepared
from archipel.training.folding import is_batch_norm

if TYPE_CHECKING:
    from archipel.compression.work import Work

HOMOGENEOUS = frozenset(
    {"Relu", "LeakyRelu", "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "Dropout"}
)
"""Operators with the same result, whether each channel's positive factor is applied before or after them."""

_LAYERS = frozenset({"Conv", "Gemm"})
_SWEEPS = 40
_SETTLED = 1e-3  # of the logarithm of a factor
_LARGEST_FACTOR = 1e4
_HARMLESS_DB = 40.0
_BATCH = 64


@dataclass(frozen=True)
class Pair:
    """Two layers in a row, whose weights are `first` and `weight`.

    `divided`: (name, axis of the channels) of each tensor that is divided: the first layer's weight and bias, or the
    scale and shift of the last BatchNormalization behind it. Normalizations multiply the channels with `factor`,
    [channels], and the last one with the tensor `scale`. A channel is read as `repeat` inputs of `weight`.
    """

    first: str
    first_axis: int
    factor: np.ndarray
    scale: str | None
    divided: tuple[tuple[str, int], ...]
    weight: str
    groups: int
    axis: int
    repeat: int


def equalize_channels(model: CompressedModel, examples: Examples, work: Work) -> CompressedModel:
    """`model` with other parameters that compute the same, up to rounding.

    No factor passes through a Clip from 0 (Relu6). Such a Clip becomes Relu where it cuts off less than -40 dB of what
    it lets through on the calibration data.
    """
    result, opened = _open_clips(model, examples)
    neighbours = list(pairs(result))
    values = dict(result.parameters)
    dtypes = {name: array.dtype for name, array in values.items()}
    # In float64: a tensor is multiplied in every sweep.
    values = {name: array.astype(np.float64) for name, array in values.items()}
    # A layer is the second of one pair and the first of the next, so each pair disturbs its neighbours: repeat until no
    # factor differs from 1.
    for _ in range(_SWEEPS):
        if max((_equalize(pair, values) for pair in neighbours), default=0.0) < _SETTLED:
            break
    work.note(equalized=[f"{pair.first} -> {pair.weight}" for pair in neighbours], opened_clips=opened)
    changed = {name for pair in neighbours for name in [pair.weight, *(name for name, _ in pair.divided)]}
    return result.with_parameters({name: values[name].astype(dtypes[name]) for name in sorted(changed)})


def pairs(model: CompressedModel) -> Iterable[Pair]:
    """The layers that can be equalized, in the graph's order."""
    graph = prepared(model, "frozen").ir.graph
    parameters = set(model.parameter_names)
    for node in graph:
        if node.op_type in _LAYERS and node.domain == "":
            pair = _pair(node, parameters)
            if pair is not None:
                yield pair


def _pair(node: ir.Node, parameters: set[str]) -> Pair | None:
    """The pair whose first layer is `node`; None where it cannot be equalized."""
    weight = _parameter(node.inputs[1], parameters)
    if weight is None or (node.op_type == "Gemm" and _has_factors(node)):
        return None
    axis = 0 if node.op_type == "Conv" or node.attributes.get_int("transB", 0) == 1 else 1
    channels = dims(weight)[axis]
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    producers: list[ir.Value | None] = [node.inputs[1]] if bias is None else [node.inputs[1], bias]
    factor = np.ones(channels if isinstance(channels, int) else 0)
    value = node.outputs[0]
    scale = None
    after = only_reader(value)
    while after is not None and is_batch_norm(after) and value is after.inputs[0]:
        variance = constant_array(after.inputs[4])
        earlier = np.ones(1) if scale is None else constant_array(scale)
        if variance is None or earlier is None:
            return None
        factor = factor * earlier / np.sqrt(variance + after.attributes.get_float("epsilon", EPSILON))
        # The normalization is divided. The layer before it stays, or its running statistics would be wrong.
        producers, scale, value = list(after.inputs[1:3]), after.inputs[1], after.outputs[0]
        after = only_reader(value)
    value, second = _next_layer(value)
    if second is None or second.inputs[0] is not value or (second.op_type == "Gemm" and _has_factors(second)):
        return None
    reader = _parameter(second.inputs[1], parameters)
    tensors = [weight if scale is None and v is producers[0] else _parameter(v, parameters) for v in producers]
    # A tensor that another node reads, or that is no parameter, cannot change, nor can one that both layers read.
    if reader is None or any(tensor is None for tensor in tensors) or reader is weight:
        return None
    if second.op_type == "Conv":
        groups, inputs = second.attributes.get_int("group", 1), 1
        count = groups * int(dims(reader)[1] or 0)
    else:
        groups, inputs = 1, 1 if second.attributes.get_int("transB", 0) else 0
        count = int(dims(reader)[inputs] or 0)
    # Behind a Flatten of pictures each channel is several inputs in a row.
    if not len(factor) or count % len(factor):
        return None
    divided = tuple((str(tensor.name), axis if tensor is weight else 0) for tensor in tensors if tensor is not None)
    return Pair(
        str(weight.name), axis, factor, None if scale is None else str(scale.name), divided, str(reader.name), groups,
        inputs, count // len(factor),
    )  # fmt: skip


def _next_layer(value: ir.Value) -> tuple[ir.Value, ir.Node | None]:
    """The value that the next layer reads, behind operators that a factor passes through, and that layer."""
    node = only_reader(value)
    while node is not None and node.domain == "":
        if node.op_type in _LAYERS:
            return value, node
        if not _flattens(node) and node.op_type not in HOMOGENEOUS:
            break
        value = node.outputs[0]
        node = only_reader(value)
    return value, None


def _flattens(node: ir.Node) -> bool:
    """Whether the node joins all axes but the first, so that a channel becomes several inputs in a row."""
    source, result = node.inputs[0], node.outputs[0]
    if node.op_type not in ("Flatten", "Reshape") or source is None or source.shape is None or result.shape is None:
        return False
    before, after = dims(source), dims(result)
    return len(after) == 2 and len(before) > 2 and before[0] is not None and before[0] == after[0]


def _has_factors(node: ir.Node) -> bool:
    """Whether a Gemm scales or transposes what it reads."""
    factors = [node.attributes.get_float(name, 1.0) for name in ("alpha", "beta")]
    return factors != [1.0, 1.0] or bool(node.attributes.get_int("transA", 0))


def _parameter(value: ir.Value | None, parameters: set[str]) -> ir.Value | None:
    """The parameter behind `value` (and behind its mask), if nothing else reads it."""
    maker = None if value is None else value.producer()
    if maker is not None and maker.op_type == "Mul":
        value = next((v for v in maker.inputs if v is not None and v.name in parameters), None)
        if value is None or find_mask(value, parameters) is None:
            return None
    if value is None or value.name not in parameters or len(list(value.uses())) != 1 or value.shape is None:
        return None
    return value


def _open_clips(model: CompressedModel, examples: Examples) -> tuple[CompressedModel, list[str]]:
    """A copy with Relu for every Clip from 0 that cuts off next to nothing on the calibration data; their outputs."""
    probe = Model(prepared(model, "frozen").ir)
    op = Builder(probe.ir.graph, scope="clips")
    clips = [node for node in probe.ir.graph if node.op_type == "Clip" and _from_zero(node)]
    names = [str(node.outputs[0].name) for node in clips]
    if not clips:
        return model, []
    # Two sums of squares for each Clip, computed in the graph: what it cuts off, and what it lets through.
    probe.ir.graph.outputs.clear()
    for index, node in enumerate(clips):
        cut = op.Sub(op.Relu(node.inputs[0]), node.outputs[0])
        op.name_output(op.ReduceSumSquare(cut, keepdims=0), f"cut.{index}")
        op.name_output(op.ReduceSumSquare(node.outputs[0], keepdims=0), f"left.{index}")
    run = open_session(probe)
    sums = np.zeros((len(clips), 2))
    for batch in examples.batches(fixed_batch(model) or _BATCH):
        sums += np.array(run(dict(batch.fields)), np.float64).reshape(-1, 2)
    opened = {name for name, (cut, left) in zip(names, sums) if cut * 10 ** (_HARMLESS_DB / 10) <= left}
    result = model.copy()
    for node in result.ir.graph:
        if node.op_type == "Clip" and str(node.outputs[0].name) in opened:
            bounds = [value for value in node.inputs[1:] if value is not None]
            node.op_type = "Relu"
            node.resize_inputs(1)
            for bound in bounds:
                # Clips may share a bound.
                if bound.is_initializer() and not bound.uses():
                    result.ir.graph.initializers.pop(str(bound.name))
    return result, sorted(opened)


def _from_zero(node: ir.Node) -> bool:
    low = constant_array(node.inputs[1]) if len(node.inputs) > 1 else None
    return low is not None and float(low) == 0.0


def _equalize(pair: Pair, values: dict[str, np.ndarray]) -> float:
    """Divide and multiply the tensors of one pair. Returns the largest magnitude of a factor's logarithm."""
    weight = values[pair.weight]
    by_input = _by_input(pair, weight)
    before = np.abs(np.moveaxis(values[pair.first], pair.first_axis, 0)).reshape(len(pair.factor), -1).max(axis=1)
    before = before * pair.factor * (1.0 if pair.scale is None else np.abs(values[pair.scale]))
    after = np.abs(by_input).reshape(len(pair.factor), -1).max(axis=1)
    # A channel without weights on one side has no ratio, and keeps the factor 1.
    used = (before > 0) & (after > 0)
    s = np.where(used, np.sqrt(np.where(used, before, 1) / np.where(used, after, 1)), 1.0)
    s = np.clip(s, 1 / _LARGEST_FACTOR, _LARGEST_FACTOR)
    for name, axis in pair.divided:
        values[name] = values[name] / s.reshape([-1 if i == axis else 1 for i in range(values[name].ndim)])
    spread = np.repeat(s, pair.repeat).reshape([-1] + [1] * (by_input.ndim - 1))
    values[pair.weight] = _from_input(pair, by_input * spread, weight.shape)
    return float(np.abs(np.log(s)).max())


def _by_input(pair: Pair, weight: np.ndarray) -> np.ndarray:
    """[inputs, ...]: in a grouped Conv only one group's rows have weights for an input channel."""
    if pair.groups == 1:
        return np.moveaxis(weight, pair.axis, 0)
    grouped = weight.reshape(pair.groups, -1, *weight.shape[1:])
    return np.moveaxis(grouped, 2, 1).reshape(pair.groups * weight.shape[1], -1, *weight.shape[2:])


def _from_input(pair: Pair, by_input: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The inverse of `_by_input`."""
    if pair.groups == 1:
        return np.moveaxis(by_input, 0, pair.axis)
    grouped = by_input.reshape(pair.groups, shape[1], -1, *shape[2:])
    return np.moveaxis(grouped, 1, 2).reshape(shape)
