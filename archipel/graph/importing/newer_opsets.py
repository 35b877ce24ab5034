"""From newer opsets down: operators that the internal opset lacks become their function bodies, or are refused."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import onnx
import onnx.inliner
from onnx import defs, helper

from archipel.errors import ModelImportError
from archipel.graph.opset import OPSET, difference, opset_of, stamp, standard_nodes
from archipel.graph.walk import proto_bodies

_BODIES = "archipel.bodies"


def lower_opset(proto: onnx.ModelProto, version: int) -> onnx.ModelProto:
    """Bring a model of opset `version` > OPSET down. Raises ModelImportError that names the operator in the way."""
    # A body may contain operators that OPSET lacks as well, so until there are none. One that is still there after its
    # expansion has no body, and is refused below.
    expanded: set[str] = set()
    while bodies := {n.op_type for n in standard_nodes(proto.graph.node) if difference(n, version)} - expanded:
        proto = expand(proto, bodies)
        expanded |= bodies
    for node in standard_nodes(proto.graph.node):
        change = difference(node, version)
        if change is not None:
            raise ModelImportError(
                f"{node.op_type} {node.name!r} (opset {version}) {change}; export the model at opset {OPSET} or below, "
                "if need be with other operators"
            )
        # The attributes that OPSET lacks have no effect here, or `difference` would have named them.
        known = defs.get_schema(node.op_type, OPSET, "").attributes
        kept = [attribute for attribute in node.attribute if attribute.name in known]
        del node.attribute[:]
        node.attribute.extend(kept)
    return proto


def expand(proto: onnx.ModelProto, op_types: Collection[str]) -> onnx.ModelProto:
    """Replace operators of these types by the function bodies of their schemas, if any; in subgraphs too."""
    version = opset_of(proto.opset_import)
    schemas = {op_type: defs.get_schema(op_type, version, "") for op_type in op_types}
    nodes = [n for n in standard_nodes(proto.graph.node) if n.op_type in schemas and has_body(schemas[n.op_type])]
    if not nodes:
        return proto
    types = _types(onnx.shape_inference.infer_shapes(proto).graph)
    # onnx's own inliner of schema bodies fails on inputs left out and on attributes left at their default. So each node
    # becomes a call of a model-local function, with the body that fits it, which the function inliner then inlines.
    for node in nodes:
        schema = schemas[node.op_type]
        write_out_defaults(node, schema)
        body = _body(schema, node, version, types)
        body.domain, body.name = _BODIES, f"{node.op_type}_{len(proto.functions)}"
        node.domain, node.op_type = body.domain, body.name
        proto.functions.append(body)
    proto.opset_import.append(helper.make_opsetid(_BODIES, 1))
    names = [(body.domain, body.name) for body in proto.functions if body.domain == _BODIES]
    proto = onnx.inliner.inline_selected_functions(proto, names)
    kept = [entry for entry in proto.opset_import if entry.domain != _BODIES]
    del proto.opset_import[:]
    proto.opset_import.extend(kept)
    return proto


def write_out_defaults(node: onnx.NodeProto, schema: defs.OpSchema) -> None:
    """Write a node's default attributes out: function bodies refer to them."""
    given = {attribute.name for attribute in node.attribute}
    for name, attribute in schema.attributes.items():
        if name not in given and attribute.default_value.type:
            node.attribute.append(attribute.default_value)


def has_body(schema: Any) -> bool:  # onnx's stub of OpSchema does not know its functions
    """Whether the schema defines the operator by a function of others."""
    return bool(schema.has_function or schema.has_context_dependent_function)


def _body(schema: Any, node: onnx.NodeProto, version: int, types: dict[str, onnx.TypeProto]) -> onnx.FunctionProto:
    """The function body of a node, for opset `version`."""
    # A schema has bodies for some opsets only; the newest one up to `version` counts.
    own = max(number for number in schema.all_function_opset_versions if number <= version)
    if schema.has_function:
        serialized = schema.get_function_with_opset_version(own)
    else:
        # The body depends on the types of the inputs, so on shape inference of the whole model.
        given = [types.get(name, onnx.TypeProto()).SerializeToString() for name in node.input]
        serialized = schema.get_context_dependent_function_with_opset_version(own, node.SerializeToString(), given)
    body = onnx.FunctionProto()
    body.ParseFromString(serialized)
    changed = [inner.op_type for inner in standard_nodes(body.node) if difference(inner, own, version)]
    if changed or not body.node:
        raise ModelImportError(
            f"{node.op_type} {node.name!r} (opset {version}) has no equivalent in opset {OPSET}"
            f"{' with inputs of these types' if not changed else ''}; export the model at opset {OPSET} or below"
        )
    stamp(body.opset_import, version)
    return body


def _types(graph: onnx.GraphProto) -> dict[str, onnx.TypeProto]:
    types = {value.name: value.type for value in (*graph.input, *graph.value_info, *graph.output)}
    for tensor in graph.initializer:
        types[tensor.name] = helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
    for node in graph.node:
        for inner in proto_bodies(node):
            types |= _types(inner)
    return types
