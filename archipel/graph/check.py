"""Is a graph one that any ONNX runtime opens?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx
import onnx_ir as ir
from onnx import defs

from archipel.errors import GraphError, ModelImportError
from archipel.graph.opset import OPSET
from archipel.graph.shapes import dims

_FLOATS = {"tensor(float)", "tensor(double)", "tensor(float16)", "tensor(bfloat16)"}


def check_model(model: ir.Model) -> None:
    """Raise GraphError unless every node is a standard operator of the internal opset and the whole is valid ONNX."""
    for node in model.graph.all_nodes():
        if node.domain != "":
            raise GraphError(
                f"{node.op_type} {node.name!r} is of domain {node.domain!r}; only standard operators are allowed"
            )
        try:
            schema = defs.get_schema(node.op_type, OPSET, "")
        except defs.SchemaError:
            raise GraphError(f"{node.op_type} {node.name!r} does not exist in opset {OPSET}") from None
        if schema.deprecated:
            raise GraphError(f"{node.op_type} {node.name!r} is deprecated in opset {OPSET}")
    try:
        onnx.checker.check_model(ir.to_proto(model), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise GraphError(f"not valid ONNX: {error}") from error


def refuse_unsupported(model: ir.Model) -> None:
    """Raise ModelImportError for what the schemas of the internal opset accept and its operators do not do.

    Element types that an operator does not take, Mod with fmod=0 of floating-point numbers (only opset 28 defines it),
    and pooling with a window that lies in the padding (dropped from opset 22 on, open before).
    """
    for node in model.graph.all_nodes():
        if node.domain == "":
            types = _types(node)
            if node.op_type == "Mod" and types.get("T") in _FLOATS and not _integers(node, "fmod"):
                raise ModelImportError(
                    f"{_title(node)}: fmod=0 of {types['T']} is not defined in opset {OPSET}; use fmod=1"
                )
            if _integers(node, "ceil_mode"):
                _refuse_empty_windows(node)


def _types(node: ir.Node) -> dict[str, str]:
    """The schema's type parameters ("T") -> the type that the node has for it ("tensor(float)")."""
    schema = defs.get_schema(node.op_type, OPSET, "")
    bindings: dict[str, str] = {}
    for value, parameter in _parameters(node, schema):
        if value.dtype is None or not isinstance(value.type, ir.TensorType):
            continue
        found = f"tensor({value.dtype.name.lower()})"
        if found not in parameter.types:
            raise ModelImportError(
                f"{_title(node)}: {value.name!r} is {found}, which {node.op_type} does not take in opset {OPSET}; use "
                f"one of {', '.join(sorted(parameter.types))}"
            )
        if parameter.is_homogeneous and bindings.setdefault(parameter.type_str, found) != found:
            raise ModelImportError(
                f"{_title(node)}: {value.name!r} is {found} where {bindings[parameter.type_str]} is needed, the type "
                "of the others; put a Cast between"
            )
    return bindings


def _refuse_empty_windows(node: ir.Node) -> None:
    x, y = node.inputs[0], node.outputs[0]
    if x is None or x.shape is None or y.shape is None:
        return
    pads, strides = _integers(node, "pads"), _integers(node, "strides")
    for axis, (size, count) in enumerate(zip(dims(x)[2:], dims(y)[2:])):
        before, stride = pads[axis] if pads else 0, strides[axis] if strides else 1
        if isinstance(size, int) and isinstance(count, int) and (count - 1) * stride >= size + before:
            raise ModelImportError(
                f"{_title(node)}: with ceil_mode=1 the last window of axis {axis + 2} lies in the padding, which opset "
                f"{OPSET} does not define; use ceil_mode=0, or less padding"
            )


def _integers(node: ir.Node, name: str) -> list[int]:
    """An attribute of integers; empty if it is absent or 0."""
    attribute = node.attributes.get(name)
    value = [] if attribute is None else attribute.value
    return list(value) if isinstance(value, Sequence) else [value] * bool(value)


def _title(node: ir.Node) -> str:
    return f"{node.op_type} {node.name!r}"


def _parameters(node: ir.Node, schema: defs.OpSchema) -> Iterator[tuple[ir.Value, defs.OpSchema.FormalParameter]]:
    for values, formal in ((node.inputs, schema.inputs), (node.outputs, schema.outputs)):
        for index, value in enumerate(values):
            if value is not None:
                yield value, formal[min(index, len(formal) - 1)]  # the last one may repeat
