"""Sizes in numbers: what every value of a graph measures once the symbolic dimensions have a size."""

from __future__ import annotations

import math

import onnx
import onnx_ir as ir

from archipel.errors import GraphError
from archipel.graph.shapes import dims


class Sizes:
    """The shape of every value of a model whose symbolic dimensions are all `free`."""

    def __init__(self, model: ir.Model, free: int) -> None:
        self._free = free
        proto = ir.to_proto(model)
        fields = {field.name for field in proto.graph.input}
        names = {dim.dim_param for field in proto.graph.input for dim in field.type.tensor_type.shape.dim} - {""}
        for value in (*proto.graph.input, *proto.graph.value_info, *proto.graph.output):
            for dim in value.type.tensor_type.shape.dim:
                if not dim.HasField("dim_value") and (dim.dim_param in names or value.name in fields):
                    dim.dim_value = free
        # What a reshape makes of two dimensions has no name of its own, but with numbers it has a size.
        inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
        self._found = {
            value.name: [d.dim_value if d.HasField("dim_value") else None for d in value.type.tensor_type.shape.dim]
            for value in (*inferred.graph.value_info, *inferred.graph.output)
            if value.type.tensor_type.HasField("shape")
        }

    def __call__(self, value: ir.Value | None) -> tuple[int, ...]:
        """Empty for a value that is left out. Raises GraphError if its rank is not known."""
        if value is None or not value.name:
            return ()
        found: list[int | None] = self._found.get(value.name, [])
        if value.shape is not None:
            known = [d if isinstance(d, int) else None for d in dims(value)]
            found = [a if b is None else b for a, b in zip(found, known)] if len(found) == len(known) else known
        elif value.name not in self._found:
            raise GraphError(f"value {value.name!r} has no known shape, so its size has no bound")
        node = value.producer()
        if found.count(None) == 1 and node is not None and node.op_type == "Reshape":
            rest = math.prod(d for d in found if d is not None)
            return tuple(math.prod(self(node.inputs[0])) // max(rest, 1) if d is None else d for d in found)
        return tuple(self._free if d is None else d for d in found)

    def nbytes(self, value: ir.Value) -> int:
        """Bytes of its elements, packed where two share a byte. Raises GraphError if shape or type is not known."""
        if value.dtype is None:
            raise GraphError(f"value {value.name!r} has no known type, so its size has no bound")
        return math.ceil(math.prod(self(value)) * value.dtype.itemsize)
