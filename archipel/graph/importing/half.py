"""Float16 and bfloat16 become float32, in which models train and every runtime computes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from archipel.graph.walk import levels, values

_HALF = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
_NUMBERS = frozenset(map(int, _HALF))
# Attributes that name an element type: `to` of Cast, `dtype` of Random* and EyeLike, the last of window functions.
_TYPES = frozenset({"to", "dtype", "output_datatype"})


def widen(model: ir.Model) -> list[str]:
    """Make every float16 and bfloat16 value float32, inputs and outputs of the model included. Changes `model`.

    Casts between them then do nothing. Returns a list of one note for the report, empty if there was nothing to do.
    """
    ports = [value.name or "" for value in (*model.graph.inputs, *model.graph.outputs) if value.dtype in _HALF]
    weights, inner = 0, 0  # counts, for the note
    for graph in levels(model.graph):
        for value in graph.initializers.values():
            if value.dtype in _HALF and value.const_value is not None:
                value.const_value = _widened(value.const_value)
                weights += 1
        for value in values(graph):
            if value.dtype in _HALF:
                value.dtype = ir.DataType.FLOAT
                inner += 1
        for node in graph:
            _widen_attributes(node)
    if not inner:
        return []
    note = f"float16 became float32, {weights} weights among it"
    if ports:
        note += f"; {', '.join(map(repr, ports))} are float32 too, where the source has them in half precision"
    return [note]


def _widen_attributes(node: ir.Node) -> None:
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in _HALF:
            node.attributes[name] = ir.AttrTensor(name, _widened(attribute.as_tensor()))
        elif attribute.type == ir.AttributeType.INT and name in _TYPES and attribute.as_int() in _NUMBERS:
            node.attributes[name] = ir.AttrInt64(name, int(ir.DataType.FLOAT))


def _widened(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.tensor(tensor.numpy().astype(np.float32), name=tensor.name)
