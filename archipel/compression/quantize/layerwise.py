"""Fits rounded layers one after the other: AdaRound chooses integers, bias correction restores the output's mean.

Each layer is fitted to its input behind the layers that are fitted already, so that it makes up for their errors too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from archipel.compression.compressed import CompressedModel
from archipel.compression.deploy import constants, evaluate_constants
from archipel.compression.examples import Examples, fixed_batch
from archipel.compression.low_rank.moments import windows
from archipel.compression.low_rank.splits import Window, window
from archipel.compression.quantize.adaround import Moments, choose_integers
from archipel.compression.quantize.placement import Layer, layers
from archipel.compression.quantize.simulation import correctable, float_form
from archipel.compression.quantize.walk import Walk
from archipel.graph import Builder, Model
from archipel.graph.shapes import dims

if TYPE_CHECKING:
    from archipel.compression.work import Work

EXAMPLES = 256
_BATCH = 64
_BYTES = 2**27
"""At most, for the network's largest value over all examples; above that fewer examples are taken."""
_PLACES = 32  # windows of each picture that a convolution is fitted to


@dataclass
class Fitted:
    """New contents of parameters, corrections of biases by `Layer.key`, and for each weight the errors of its layer."""

    parameters: dict[str, np.ndarray] = field(default_factory=dict)
    corrections: dict[str, np.ndarray] = field(default_factory=dict)
    errors: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Weight:
    """The input of a layer's QuantizeLinear: `effective` = `factor` (masks, folded normalizations) times `parameter`.

    All arrays have the shape that the layer reads; `scale` is that of each element. `transposed` says that the model
    stores the transpose of `parameter`.
    """

    name: str
    parameter: np.ndarray
    effective: np.ndarray
    factor: np.ndarray
    scale: np.ndarray
    transposed: bool


def fit_layers(
    model: CompressedModel,
    simulated: ir.Model,
    examples: Examples,
    work: Work,
    *,
    reference: CompressedModel | None = None,
    levels: int = 127,
    rounding_steps: int = 0,
    correct: bool = False,
) -> Fitted:
    """Fit all layers that are rounded in `simulated`, a graph of `model`, which changes.

    `rounding_steps` above 0: AdaRound chooses the integers, up to `levels`. A weight whose nearest integer is another
    one moves onto the chosen grid point, so that the float parameter rounds to the chosen integers. `correct`: biases
    are corrected. `reference` is the float network to come close to, by default `model`.
    """
    # Both graphs have the same names: a layer is found in the other one by the name of its output, `Layer.key`.
    source = float_form(reference or model)
    floats = {layer.key: layer for layer in layers(source.graph, constants(source.graph))}
    rounded_layers = [
        layer for layer in layers(simulated.graph, constants(simulated.graph)) if _quantizer(layer) is not None
    ]
    batches = [dict(batch.fields) for batch in _calibration_batches(model, source, examples)]
    rounded_walk, float_walk = Walk(simulated, batches), Walk(source, batches)
    weights = _weights(model, simulated, rounded_layers) if rounding_steps else {}
    op = Builder(simulated.graph, scope="fit")
    result = Fitted()
    for number, layer in enumerate(rounded_layers, start=1):
        work.progress(number, len(rounded_layers), f"layer {layer.name}")
        read, exact = rounded_walk.before(layer.node), float_walk.before(floats[layer.key].node)
        weight = weights.get(layer.key)
        if weight is not None:
            chosen, errors = _round(layer, weight, read, exact, levels, rounding_steps, work.seed)
            scaled = (chosen * weight.scale).astype(np.float32)
            # Before the walk goes past this layer: its output below, and all later layers, see the chosen integers.
            layer.node.replace_input_with(1, op.initializer(f"{layer.key}.rounded", scaled))
            result.parameters[weight.name] = _parameter(weight, chosen)
            result.errors[weight.name] = errors
        if correct and correctable(layer):
            outputs, wanted = rounded_walk.after(layer.node), float_walk.after(floats[layer.key].node)
            # Nagel et al. 2019, section 4.2: the mean of each channel moves back to that of the float network.
            axis = outputs[0].ndim - 1 if layer.node.op_type == "MatMul" else 1
            shift = _channel_mean(wanted, axis) - _channel_mean(outputs, axis)
            along = shift.reshape([-1 if i == axis else 1 for i in range(outputs[0].ndim)]).astype(np.float32)
            # Later layers read the corrected output.
            rounded_walk.replace(layer.node.outputs[0], [array + along for array in outputs])
            result.corrections[layer.key] = shift.astype(np.float32)
    return result


def _calibration_batches(model: Model, source: ir.Model, examples: Examples) -> list[Examples]:
    """The first examples, up to EXAMPLES and _BYTES, in batches that the model takes."""
    largest = max((_size(value) for node in source.graph for value in node.outputs), default=1)
    count = max(min(EXAMPLES, _BYTES // (4 * largest)), 1)
    fixed = fixed_batch(model)
    size = fixed or min(_BATCH, count)
    batches = list(examples.take(slice(0, max(count, size))).batches(size))
    # A graph of a fixed batch size cannot run the smaller last batch.
    return [batch for batch in batches if len(batch) == size] or batches if fixed else batches


def _size(value: ir.Value) -> int:
    """Elements for one example."""
    if value.shape is None:
        return 1
    return int(np.prod([d for d in dims(value)[1:] if isinstance(d, int)], dtype=np.int64))


def _channel_mean(arrays: list[np.ndarray], axis: int) -> np.ndarray:
    others = tuple(i for i in range(arrays[0].ndim) if i != axis)
    total = sum(array.sum(axis=others, dtype=np.float64) for array in arrays)
    mean: np.ndarray = total / sum(array.size // array.shape[axis] for array in arrays)
    return mean


def _quantizer(layer: Layer) -> ir.Node | None:
    """The QuantizeLinear that rounds the layer's weight, before a Reshape or Transpose."""
    value = layer.node.inputs[1]
    node = None if value is None else value.producer()
    if node is not None and node.op_type in ("Reshape", "Transpose") and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    if node is None or node.op_type != "DequantizeLinear" or node.inputs[0] is None:
        return None
    node = node.inputs[0].producer()
    return node if node is not None and node.op_type == "QuantizeLinear" else None


def _weights(model: CompressedModel, simulated: ir.Model, rounded_layers: list[Layer]) -> dict[str, _Weight]:
    """By `Layer.key`: weights that are one parameter times constants, where no other layer has that parameter."""
    names = [layer.weight for layer in rounded_layers]
    parameters = model.parameters
    eligible: dict[str, tuple[Layer, ir.Node]] = {}
    for layer in rounded_layers:
        quantizer = _quantizer(layer)
        fits = layer.node.op_type in ("Conv", "Gemm", "MatMul") and layer.axis is not None
        if fits and quantizer is not None and layer.weight in parameters and names.count(layer.weight) == 1:
            eligible[layer.key] = layer, quantizer
    contents = evaluate_constants(simulated, [n for _, node in eligible.values() for n in _input_names(node)])
    # The same graph over parameters of ones computes the factor; the comparison below finds what is no plain product.
    ones = simulated.clone()
    for layer, _ in eligible.values():
        array = np.ones_like(parameters[layer.weight])
        ones.graph.initializers[layer.weight].const_value = ir.tensor(array, name=layer.weight)
    factors = evaluate_constants(ones, [_input_names(node)[0] for _, node in eligible.values()])
    result = {}
    for key, (layer, node) in eligible.items():
        exact_name, scale_name = _input_names(node)
        parameter, exact = parameters[layer.weight], contents[exact_name]
        arrays = (exact, factors[exact_name], _spread(contents[scale_name], exact.shape, node))
        effective, factor, scale = (_as_read(layer, array) for array in arrays)
        # Where the graph transposes the parameter before it rounds, only one of the two products fits.
        for transposed in (False, True):
            source = parameter.T if transposed else parameter
            if source.shape == effective.shape and np.allclose(
                source * factor, effective, rtol=1e-4, atol=1e-6 * float(np.abs(effective).max())
            ):
                result[key] = _Weight(layer.weight, source, effective, factor, scale, transposed)
                break
    return result


def _as_read(layer: Layer, array: np.ndarray) -> np.ndarray:
    """An array of the QuantizeLinear's shape in the shape that the layer reads, behind a Reshape or Transpose."""
    value = layer.node.inputs[1]
    maker = None if value is None else value.producer()
    if maker is not None and maker.op_type == "Transpose":
        return array.T
    return array if value is None else array.reshape([d for d in dims(value) if isinstance(d, int)])


def _input_names(quantizer: ir.Node) -> tuple[str, str]:
    """The names of what is rounded and of its scale."""
    exact, scale = quantizer.inputs[:2]
    return str(exact and exact.name), str(scale and scale.name)


def _spread(scale: np.ndarray, shape: tuple[int, ...], quantizer: ir.Node) -> np.ndarray:
    """The scale of each element: per tensor, per index of `axis`, or per block along it (QuantizeLinear-21)."""
    axis, block = quantizer.attributes.get_int("axis", 1), quantizer.attributes.get_int("block_size", 0)
    if scale.ndim and block:
        scale = np.repeat(scale, block, axis=axis).take(range(shape[axis]), axis=axis)
    elif scale.ndim:
        scale = scale.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return np.broadcast_to(scale, shape)


def _parameter(weight: _Weight, integers: np.ndarray) -> np.ndarray:
    """The stored parameter, moved where it would not round to `integers`."""
    nearest = np.round(weight.effective / weight.scale)
    # A weight beyond the last integer stays: the scale follows from the largest weight, and would shrink with it.
    saturated = (np.abs(nearest) > np.abs(integers)) & (np.abs(nearest - integers) > 1)
    moved = (integers != nearest) & (weight.factor != 0) & ~saturated
    # A factor of 0 (a mask) hides the parameter, whatever it is.
    target = integers * weight.scale / np.where(weight.factor == 0, 1, weight.factor)
    result = np.where(moved, target, weight.parameter).astype(weight.parameter.dtype)
    return np.ascontiguousarray(result.T) if weight.transposed else result


def _round(
    layer: Layer,
    weight: _Weight,
    read: list[np.ndarray],
    exact: list[np.ndarray],
    levels: int,
    steps: int,
    seed: int,
) -> tuple[np.ndarray, dict[str, float]]:
    """The chosen integers in the shape of the weight."""
    groups = layer.node.attributes.get_int("group", 1) if layer.node.op_type == "Conv" else 1
    matrix = _as_matrix(layer, weight.effective, groups)
    scale = _as_matrix(layer, weight.scale, groups)
    # The same seed twice: rows of both networks come from the same places.
    moments = Moments.of(_rows(layer.node, read, groups, seed), _rows(layer.node, exact, groups, seed), matrix)
    integers, before, after = choose_integers(matrix, scale, moments, levels, steps)
    return _from_matrix(layer, integers, weight.effective.shape), {"nearest": before, "chosen": after}


def _rows(node: ir.Node, arrays: list[np.ndarray], groups: int, seed: int) -> np.ndarray:
    """The layer's input at places that the seed draws: [groups, rows, inputs of a group]."""
    rng = np.random.default_rng(seed)
    if node.op_type != "Conv":
        rows = np.concatenate([array.reshape(-1, array.shape[-1]) for array in arrays])
    else:
        rows = np.concatenate([windows(array, _window(node), _PLACES, rng) for array in arrays])
    rows = rows.astype(np.float64)
    if len(rows) > EXAMPLES * _PLACES:
        # After the windows: with one seed both networks draw the same rows here too.
        rows = rows[rng.permutation(len(rows))[: EXAMPLES * _PLACES]]
    return np.ascontiguousarray(rows.reshape(len(rows), groups, -1).transpose(1, 0, 2))


def _window(node: ir.Node) -> Window:
    weight = node.inputs[1]
    kernel = tuple(int(d) for d in dims(weight)[2:]) if weight is not None else ()  # type: ignore[arg-type]
    return window(node, kernel)


def _as_matrix(layer: Layer, weight: np.ndarray, groups: int) -> np.ndarray:
    """[groups, output channels of a group, inputs of a group]."""
    rows = weight if layer.axis == 0 else weight.T
    return rows.astype(np.float64).reshape(groups, rows.shape[0] // groups, -1)


def _from_matrix(layer: Layer, matrix: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The inverse of `_as_matrix`."""
    rows = matrix.reshape(matrix.shape[0] * matrix.shape[1], -1)
    return rows.reshape(shape) if layer.axis == 0 else rows.T
