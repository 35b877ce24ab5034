"""With which numbers a graph computes, read from its bytes, without the ONNX package."""

from __future__ import annotations

from typing import Literal

from archipel.bundle.graphs import onnx_schema as schema
from archipel.bundle.graphs.wire import Reader

Precision = Literal["int8", "integer weights", "float16", "float32"]

_ROUNDING = frozenset({b"QuantizeLinear", b"DynamicQuantizeLinear"})
_INTEGERS = frozenset({2, 3, 21, 22})  # TensorProto: uint8, int8, uint4, int4
_HALVES = frozenset({10, 16})  # float16, bfloat16


def graph_precision(data: bytes) -> Precision:
    """The precision of a serialized ModelProto that `inspect_graph` accepts.

    "int8": what flows between layers is rounded to 8 bits, weights mostly, too. "integer weights": they are stored in 8
    or 4 bits, and computed with as floats. Else the smaller of float16 and float32 that it has among its constants.
    Raises WireError for other bytes.
    """
    reader = Reader(data)
    graph = reader.read(schema.GRAPH, reader.read(schema.MODEL, (0, len(data)))["graph"])
    nodes = (reader.read(schema.NODE, span) for span in graph.get("node", []))
    if any(data[slice(*node["op_type"])] in _ROUNDING for node in nodes):
        return "int8"
    types = {reader.read(schema.TENSOR, span).get("data_type") for span in graph.get("initializer", [])}
    if types & _INTEGERS:
        return "integer weights"
    return "float16" if types & _HALVES else "float32"
