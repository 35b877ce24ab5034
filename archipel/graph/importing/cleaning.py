"""Cleaning at import of what exporters leave in a graph: weights become initializers, shapes constants."""

from __future__ import annotations

import onnx_ir as ir

from archipel.graph.importing.bodies import lift_initializers
from archipel.graph.parameters import parameter_names
from archipel.graph.passes import FoldConstants, fix_reshape_targets, remove_dead_code, remove_identities
from archipel.graph.shapes import constant_array, dims, is_float, static_size
from archipel.graph.walk import final_readers

# Largest constant, in elements, that folding computes: a few bytes of a file can ask for any size (ConstantOfShape).
_MAX_FOLDED = 512 * 512

# Inputs that are weights, by operator.
_WEIGHTS: dict[str, tuple[int, ...]] = {
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "Gemm": (0, 1, 2),
    "MatMul": (0, 1),
    "BatchNormalization": (1, 2, 3, 4),
    "InstanceNormalization": (1, 2),
    "LayerNormalization": (1, 2),
    "GroupNormalization": (1, 2),
    "PRelu": (1,),
    "LSTM": (1, 2, 3),
    "GRU": (1, 2, 3),
    "RNN": (1, 2, 3),
}
_LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_RECURRENT = frozenset({"LSTM", "GRU", "RNN"})


def clean(model: ir.Model) -> None:
    """Weights that are Constants become initializers; Identity and casts to the same type go; shape arithmetic and
    other constants are folded, as far as they are small. Changes `model`.

    Weights keep their shapes: a Transpose or Reshape between a weight and its layer stays in the graph.
    """
    # In this order: Casts and Identities hide weights from the step after them, which in turn must have found the
    # weights before folding computes what is left.
    for node in model.graph.all_nodes():
        _drop_cast(node)
    remove_identities(model)
    _lift_weights(model)
    FoldConstants(parameter_names(model), preserved=_is_large)(model)
    remove_identities(model)
    fix_reshape_targets(model)
    lift_initializers(model)
    remove_dead_code(model)


def _drop_cast(node: ir.Node) -> None:
    source, output = node.inputs[0] if node.inputs else None, node.outputs[0] if node.outputs else None
    if node.op_type != "Cast" or node.domain != "" or source is None or output is None:
        return
    # A Cast to the type that a value has already; widening float16 leaves many.
    if source.dtype is not None and source.dtype == output.dtype:
        node.op_type = "Identity"
        node.attributes.clear()


def _lift_weights(model: ir.Model) -> None:
    for node in list(model.graph.all_nodes()):
        if node.op_type != "Constant" or node.domain != "" or node.graph is None:
            continue
        output, array = node.outputs[0], constant_array(node.outputs[0])
        if array is None or array.ndim == 0 or not is_float(output) or output.is_graph_output():
            continue
        # Only constants that arrive where an operator takes a weight become parameters.
        if not any(_is_weight(*end) for end in final_readers(output, _rearranges)) and not _feeds_recurrence(output):
            continue
        name = output.name or ""
        tensor = ir.tensor(array, name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)
        output.replace_all_uses_with(value)
        node.graph.remove(node, safe=True)
        model.graph.register_initializer(value)


def _is_large(node: ir.Node) -> bool:
    """Whether an output is, or may be, too large to fold."""
    sizes = [None if output.shape is None else static_size(dims(output)) for output in node.outputs]
    return any(size is None or size > _MAX_FOLDED for size in sizes)


def _rearranges(node: ir.Node) -> bool:
    return node.op_type in ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten") and node.domain == ""


def _feeds_recurrence(value: ir.Value) -> bool:
    """Whether a recurrent layer reads the value as a weight, also with its gates in another order (Slice, Concat)."""
    waiting, seen = [value], {value}
    while waiting:
        for node, index in waiting.pop().uses():
            if node.domain == "" and node.op_type in _RECURRENT and index in _WEIGHTS[node.op_type]:
                return True
            moved = node.domain == "" and (node.op_type == "Concat" or (index == 0 and node.op_type == "Slice"))
            if (moved or (index == 0 and _rearranges(node))) and node.outputs[0] not in seen:
                seen.add(node.outputs[0])
                waiting.append(node.outputs[0])
    return False


def _is_weight(node: ir.Node, index: int) -> bool:
    if node.domain != "":
        return False
    if node.op_type == "Add":  # a bias, if the other summand comes from a layer
        other = node.inputs[1 - index]
        producer = None if other is None else other.producer()
        return producer is not None and producer.domain == "" and producer.op_type in _LAYERS
    return index in _WEIGHTS.get(node.op_type, ())
