"""Static and symbolic shapes: reading, comparing and inferring them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
from onnx import defs

from archipel.errors import GraphError
from archipel.graph.walk import levels, values
from archipel.library_errors import one_line

Dim = int | str | None
"""A size, the name of a symbolic size, or None for an unknown one."""

FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})

# Inference reads the content of constants such as axes and sizes. Larger ones are weights: serializing them costs time.
_MAX_SHAPE_DATA = 64


def dims(value: ir.Value) -> tuple[Dim, ...]:
    """The value's dimensions. Raises GraphError if not even the rank is known."""
    if value.shape is None:
        node = value.producer()
        squeezes_all = node is not None and node.op_type == "Squeeze" and len(node.inputs) == 1
        raise GraphError(
            f"the shape of {value.name!r}{produced_by(value)} is not known; declare the shapes of the model's inputs, "
            + ("or give that Squeeze its axes" if squeezes_all else "or add value_info for it")
        )
    return tuple(d if isinstance(d, int) else d.value for d in value.shape)


def rank(value: ir.Value) -> int:
    return len(dims(value))


def dtype_of(value: ir.Value) -> ir.DataType:
    """The value's element type. Raises GraphError if it is not known."""
    if value.dtype is None:
        raise GraphError(f"the element type of {value.name!r}{produced_by(value)} is not known")
    return value.dtype


def is_float(value: ir.Value) -> bool:
    return value.dtype in FLOATS


def same_dim(a: Dim, b: Dim) -> bool:
    """Whether two dimensions are certainly equal; unknown sizes never are."""
    return a is not None and a == b


def same_shape(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """Whether two shapes are certainly equal."""
    return len(a) == len(b) and all(map(same_dim, a, b))


def may_be_equal(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """Whether two shapes can be equal at run time, with some numbers for the symbolic and unknown sizes."""
    return len(a) == len(b) and all(x == y or not (isinstance(x, int) and isinstance(y, int)) for x, y in zip(a, b))


def complete_shape(value: ir.Value, like: ir.Value) -> None:
    """Fill in the unknown sizes of `value`, and those fixed in `like`, which has the same shape at run time."""
    if like.shape is None:
        return
    if value.shape is None:
        value.shape = like.shape
        return
    known = [
        theirs if ours is None or isinstance(theirs, int) else ours for ours, theirs in zip(dims(value), dims(like))
    ]
    value.shape = ir.Shape(known)


def with_axis(value: ir.Value, axis: int, length: Dim) -> ir.Shape:
    """The shape of `length` such values, stacked along a new axis; a negative axis counts from the result's end."""
    shape = list(dims(value))
    shape.insert(axis + len(shape) + 1 if axis < 0 else axis, length)
    return ir.Shape(shape)


def rename_size(graph: ir.Graph, old: str, new: str | int) -> None:
    """Give a symbolic size another name, or a number, in the graph and its bodies. Changes `graph`."""
    for level in levels(graph):
        for value in values(level):
            if value.shape is not None and old in dims(value):
                value.shape = ir.Shape([new if d == old else d for d in dims(value)])


def static_size(shape: Sequence[Dim]) -> int | None:
    """Number of elements, None if a dimension is symbolic."""
    return math.prod(d for d in shape if isinstance(d, int)) if is_static(shape) else None


def is_static(shape: Sequence[Dim]) -> bool:
    return all(isinstance(d, int) for d in shape)


def fixed_sizes(shape: Sequence[Dim]) -> list[int]:
    """The sizes of a shape that has no symbolic dimension. Raises GraphError for one that has."""
    sizes = [d for d in shape if isinstance(d, int)]
    if len(sizes) < len(shape):
        raise GraphError(f"expected fixed sizes, got {list(shape)}")
    return sizes


def produced_by(value: ir.Value) -> str:
    node = value.producer()
    return f" (output of {node.op_type} {node.name!r})" if node is not None else ""


def constant_array(value: ir.Value | None) -> np.ndarray | None:
    """The value's content if the graph fixes it (initializer that is no input, or Constant node), else None."""
    # An input with an initializer has only a default, which the caller may replace.
    if value is None or value.is_graph_input():
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def infer_node(node: ir.Node, opset: int) -> None:
    """Set type and shape of a node's outputs as far as ONNX's inference knows them. Raises GraphError if it fails."""
    schema = defs.get_schema(node.op_type, opset, node.domain)
    types: dict[str, onnx.TypeProto] = {}
    data: dict[str, onnx.TensorProto] = {}
    for value in node.inputs:
        if value is None or value.name is None or value.dtype is None:
            continue
        if isinstance(value.type, ir.TensorType):
            shape = None if value.shape is None else dims(value)
            types[value.name] = onnx.helper.make_tensor_type_proto(int(value.dtype), shape)
        elif value.type is not None:  # a sequence, an optional
            types[value.name] = ir.serde.serialize_type(value.type)
        content = constant_array(value)
        if content is not None and content.size <= _MAX_SHAPE_DATA:
            data[value.name] = onnx.numpy_helper.from_array(content, value.name)
    try:
        inferred = onnx.shape_inference.infer_node_outputs(
            schema,
            ir.serde.serialize_node(node),  # to_proto takes longer: it first checks ten protocols one after the other
            types,
            data,
            opset_imports=[onnx.helper.make_opsetid(node.domain, opset)],
        )
    except (onnx.shape_inference.InferenceError, KeyError) as error:
        raise GraphError(f"{node.op_type} {node.name!r}: {one_line(error)}") from error
    for output in node.outputs:
        proto = inferred.get(output.name or "")
        if proto is not None and not proto.HasField("tensor_type"):
            output.type = ir.serde.deserialize_type_proto_for_type(proto)
        if proto is None or not proto.HasField("tensor_type"):
            continue
        output.dtype = ir.DataType(proto.tensor_type.elem_type)
        if proto.tensor_type.HasField("shape"):
            output.shape = ir.Shape([_dim(d) for d in proto.tensor_type.shape.dim])


def _dim(dim: onnx.TensorShapeProto.Dimension) -> int | ir.SymbolicDim:
    if dim.HasField("dim_value"):
        return int(dim.dim_value)
    return ir.SymbolicDim(dim.dim_param or None)
