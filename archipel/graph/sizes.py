"""Sizes in numbers: the shape of every value of a graph for one choice of the symbolic dimensions."""

from __future__ import annotations

import math

import onnx
import onnx_ir as ir

from archipel.errors import GraphError
from archipel.graph.shapes import dims, produced_by


class Sizes:
    """Shapes and bytes of a model's values with all symbolic dimensions equal to `free`."""

    def __init__(self, model: ir.Model, free: int) -> None:
        self._free = free
        proto = ir.to_proto(model)
        fields = {field.name for field in proto.graph.input}
        # Only names of the inputs' dimensions get the number; those of inner values may stand for a product of several.
        names = {dim.dim_param for field in proto.graph.input for dim in field.type.tensor_type.shape.dim} - {""}
        for value in (*proto.graph.input, *proto.graph.value_info, *proto.graph.output):
            for dim in value.type.tensor_type.shape.dim:
                if not dim.HasField("dim_value") and (dim.dim_param in names or value.name in fields):
                    dim.dim_value = free
        # Inference over numbers also finds sizes that have no name, such as the product that a Reshape makes of two.
        inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
        self._inferred = {
            value.name: [d.dim_value if d.HasField("dim_value") else None for d in value.type.tensor_type.shape.dim]
            for value in (*inferred.graph.value_info, *inferred.graph.output)
            if value.type.tensor_type.HasField("shape")
        }

    def __call__(self, value: ir.Value | None) -> tuple[int, ...]:
        """The value's shape; () for an input that is left out. Raises GraphError if its rank is not known."""
        if value is None or not value.name:
            return ()
        shape: list[int | None] = self._inferred.get(value.name, [])
        if value.shape is not None:
            known = [d if isinstance(d, int) else None for d in dims(value)]
            shape = [a if b is None else b for a, b in zip(shape, known)] if len(shape) == len(known) else known
        elif value.name not in self._inferred:
            raise GraphError(
                f"value {value.name!r}{produced_by(value)} has no known shape, so its size has no bound; export a loop "
                "unrolled or with carried values of one shape, and write the shapes of computed values into the file"
            )
        node = value.producer()
        # A Reshape keeps the number of elements, which gives the one size that is missing.
        if shape.count(None) == 1 and node is not None and node.op_type == "Reshape":
            rest = math.prod(d for d in shape if d is not None)
            return tuple(math.prod(self(node.inputs[0])) // max(rest, 1) if d is None else d for d in shape)
        return tuple(self._free if d is None else d for d in shape)

    def nbytes(self, value: ir.Value) -> int:
        """Bytes of its elements; 4-bit types have two to a byte. Raises GraphError if shape or type is not known."""
        if value.dtype is None:
            raise GraphError(f"value {value.name!r} has no known type, so its size has no bound")
        if value.dtype in (ir.DataType.STRING, ir.DataType.UNDEFINED):
            raise GraphError(f"value {value.name!r} is text, which has no fixed size; give numbers, such as token ids")
        return math.ceil(math.prod(self(value)) * value.dtype.itemsize)
