"""Sizes in numbers: the shape of every value of a graph for one choice of the symbolic dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir

from archipel.errors import GraphError
from archipel.graph.shapes import constant_array, dims, produced_by
from archipel.graph.walk import bodies, proto_bodies, proto_nodes

_ENDLESS = 2**31  # exporters write the largest int64 for a loop that only its condition ends
_POINTWISE = frozenset(
    {
        "Cast",
        "Identity",
        "Not",
        "And",
        "Or",
        "Xor",
        "Equal",
        "Less",
        "LessOrEqual",
        "Greater",
        "GreaterOrEqual",
        "Where",
    }
    | {"Add", "Sub", "Mul", "Div", "Neg", "Abs", "Relu", "Sigmoid", "Tanh", "Exp", "Sqrt"}
)
_NO_LARGER = frozenset({"Slice", "Squeeze", "Unsqueeze", "Reshape", "Flatten", "Transpose"})
_MAX_RANK = 64  # a longer vector holds no shape
_LARGE = 1 << 20
"""Tensors of more bytes hold no shape either, and would be copied several times."""


class Sizes:
    """Shapes and bytes of a model's values with all symbolic dimensions equal to `free`.

    A loop that only its condition ends has `endless` iterations; None: what depends on it is refused.
    """

    def __init__(self, model: ir.Model, free: int, endless: int | None = None) -> None:
        self._free, self._endless = free, endless
        proto = ir.to_proto(_without_weights(model))
        fields = {field.name for field in proto.graph.input}
        # Only names of the inputs' dimensions get the number; those of inner values may stand for a product of several.
        names = {dim.dim_param for field in proto.graph.input for dim in field.type.tensor_type.shape.dim} - {""}
        graphs = [proto.graph, *(body for node in proto_nodes(proto.graph.node) for body in proto_bodies(node))]
        for value in (value for graph in graphs for value in (*graph.input, *graph.value_info, *graph.output)):
            for dim in value.type.tensor_type.shape.dim:
                if not dim.HasField("dim_value") and (dim.dim_param in names or value.name in fields):
                    dim.dim_value = free
        # Inference over numbers also finds sizes that have no name, such as the product that a Reshape makes of two.
        inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True).graph
        graphs = [inferred, *(body for node in proto_nodes(inferred.node) for body in proto_bodies(node))]
        self._inferred = {
            value.name: [d.dim_value if d.HasField("dim_value") else None for d in value.type.tensor_type.shape.dim]
            for graph in graphs
            for value in (*graph.input, *graph.value_info, *graph.output)
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
            if (found := self._followed(value)) is not None:
                return found
            raise GraphError(
                f"value {value.name!r}{produced_by(value)} has no known shape, so its size has no bound; export a loop "
                "unrolled or with carried values of one shape, and write the shapes of computed values into the file"
            )
        node = value.producer()
        # A Loop stacks what its body gives in each iteration.
        stacked = node is not None and node.op_type == "Loop" and (value.index() or 0) >= len(node.inputs) - 2
        if node is not None and stacked and shape[0] is None:
            shape = [self.iterations(node), *shape[1:]]
        # A Reshape keeps the number of elements, which gives the one size that is missing.
        if shape.count(None) == 1 and node is not None and node.op_type == "Reshape":
            rest = math.prod(d for d in shape if d is not None)
            return tuple(math.prod(self(node.inputs[0])) // max(rest, 1) if d is None else d for d in shape)
        return tuple(self._free if d is None else d for d in shape)

    def _followed(self, value: ir.Value) -> tuple[int, ...] | None:
        """A shape with as many elements as a value of unknown rank has at most; None if the graph does not show one.

        Branches of an If may give different ranks, and a Slice may compute its axes.
        """
        node = value.producer()
        if node is None or node.domain != "":
            return None
        if node.op_type == "If":
            shapes = [self(body.outputs[value.index() or 0]) for body in bodies(node)]
            return max(shapes, key=math.prod)
        if node.op_type in _NO_LARGER:
            return self(node.inputs[0])
        if node.op_type in _POINTWISE:
            return np.broadcast_shapes(*(self(source) for source in node.inputs if source is not None))
        return None

    def iterations(self, node: ir.Node) -> int:
        """How often a Loop or Scan runs its body at most. Raises GraphError for a Loop that only its condition ends."""
        if node.op_type == "Scan":
            # The last input is a sequence; all sequences have as many items.
            axis = (node.attributes.get_ints("scan_input_axes") or [0])[-1]
            return self(node.inputs[-1])[axis]
        count = self.numbers(node.inputs[0])
        if count is None or count[0] >= _ENDLESS:
            if self._endless is not None:
                return self._endless
            raise GraphError(
                f"Loop {node.name!r} has no fixed number of iterations, so its work has no bound; give it a maximum: "
                "Model.limit_loops"
            )
        return max(count[0], 0)

    def numbers(self, value: ir.Value | None) -> list[int] | None:
        """Numbers that those in a short vector or scalar of integers are never above; None if there are none.

        They follow from constants and from shapes.
        """
        content = constant_array(value)
        if content is not None:
            return [int(number) for number in content.reshape(-1)] if content.size <= _MAX_RANK else None
        node = None if value is None else value.producer()
        if node is None or node.domain != "" or not node.inputs:
            return None
        if node.op_type == "Shape":
            shape = self(node.inputs[0])
            return list(shape[node.attributes.get_int("start", 0) : node.attributes.get_int("end", None)])
        if node.op_type == "Size":
            return [math.prod(self(node.inputs[0]))]
        read = [self.numbers(source) for source in node.inputs]
        first = read[0]
        if node.op_type == "Min":
            known = [numbers for numbers in read if numbers is not None and len(numbers) == 1]
            return min(known, default=None)
        if first is None:
            return None
        if node.op_type in ("Squeeze", "Unsqueeze", "Reshape", "Cast", "Identity"):
            return first
        settings = [constant_array(source) for source in node.inputs[1:]]
        if node.op_type == "Gather" and settings[0] is not None and (settings[0] < len(first)).all():
            return [first[int(place)] for place in settings[0].reshape(-1)]
        if node.op_type == "Slice" and all(setting is not None and setting.size == 1 for setting in settings):
            start, end, *rest = (int(setting.reshape(-1)[0]) for setting in settings if setting is not None)
            return first[slice(start, end, rest[1] if len(rest) > 1 else 1)]
        return _calculate(node.op_type, first, read[1] if len(read) > 1 else None, settings)

    def nbytes(self, value: ir.Value) -> int:
        """Bytes of its elements; 4-bit types have two to a byte. Raises GraphError if shape or type is not known."""
        if value.type is not None and not isinstance(value.type, ir.TensorType):
            return self._sequence_bytes(value)
        if value.dtype is None:
            raise GraphError(f"value {value.name!r} has no known type, so its size has no bound")
        if value.dtype in (ir.DataType.STRING, ir.DataType.UNDEFINED):
            raise GraphError(f"value {value.name!r} is text, which has no fixed size; give numbers, such as token ids")
        return math.ceil(math.prod(self(value)) * value.dtype.itemsize)

    def _sequence_bytes(self, value: ir.Value) -> int:
        """Bytes of all items of a sequence or optional together, at most."""
        node = value.producer()
        kind, read = ("", []) if node is None else (node.op_type, [v for v in node.inputs if v is not None])
        if kind in ("SequenceConstruct", "SequenceEmpty", "Optional"):
            return sum(map(self.nbytes, read))
        if kind == "SequenceInsert":
            return self.nbytes(read[0]) + self.nbytes(read[1])
        if kind in ("SplitToSequence", "SequenceErase", "Identity", "OptionalGetElement"):
            return self.nbytes(read[0])
        raise GraphError(
            f"value {value.name!r}{produced_by(value)} is a sequence, whose number of items has no bound here; export "
            "a loop that stacks tensors (scan outputs) in its place"
        )


def _calculate(
    op_type: str, first: list[int], second: list[int] | None, settings: Sequence[np.ndarray | None]
) -> list[int] | None:
    """What is never exceeded by arithmetic on numbers that do not exceed `first` and `second` and are not negative."""
    if second is None or len(first) != 1 or len(second) != 1:
        return None
    a, b = first[0], second[0]
    if op_type in ("Add", "Mul", "Max"):
        return [{"Add": a + b, "Mul": a * b, "Max": max(a, b)}[op_type]]
    # Of a bound below nothing is known: only a constant can be taken away or divide.
    if op_type in ("Sub", "Div") and settings[0] is not None and b > 0:
        return [a - b if op_type == "Sub" else a // b]
    return None


def _without_weights(model: ir.Model) -> ir.Model:
    """The model, or where it has large weights a copy that has their types and shapes alone."""
    large = [name for name, value in model.graph.initializers.items() if _bytes(value) > _LARGE]
    if not large:
        return model
    copy = model.clone()
    for name in large:
        value = copy.graph.initializers[name]
        tensor = value.const_value
        assert tensor is not None
        value.const_value = ir.ExternalTensor(
            "", 0, tensor.nbytes, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=name
        )
    return copy


def _bytes(value: ir.Value) -> int:
    return 0 if value.const_value is None else value.const_value.nbytes
