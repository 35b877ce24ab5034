"""From ONNX as the world writes it to the one form used here."""

from __future__ import annotations

from collections.abc import Iterable

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common
from onnx import defs

from archipel.errors import ModelImportError
from archipel.graph.check import refuse_unknown, refuse_unsupported
from archipel.graph.functions import inline_unknown, record_inlined, refuse_too_many, share_opset
from archipel.graph.newer_opsets import expand, has_body, lower_opset, write_out_defaults
from archipel.graph.older_opsets import raise_opset
from archipel.graph.opset import IR_VERSION, OPSET, opset_of, stamp, standard_nodes
from archipel.graph.parameters import parameter_names, record_parameters
from archipel.graph.passes import simplify
from archipel.graph.sources import MAX_BYTES, refuse_external
from archipel.graph.walk import levels, proto_bodies, values


def normalize(proto: onnx.ModelProto, parameters: Iterable[str] | None = None) -> ir.Model:
    """Check, inline local functions, bring to the internal opset, infer shapes, name every dimension.

    `parameters` names the initializers that are weights, where the importer knows. Raises ModelImportError.
    """
    if not proto.graph.output:
        raise ModelImportError("the model has no graph outputs")
    if proto.ByteSize() > MAX_BYTES:
        raise ModelImportError(f"the model has {proto.ByteSize()} bytes; at most {MAX_BYTES} are supported")
    _require_tensors(proto.graph)
    refuse_external(proto)
    refuse_too_many(proto)
    original, proto = proto, onnx.ModelProto()
    proto.CopyFrom(original)
    try:
        if not all(value.type.tensor_type.HasField("shape") for value in proto.graph.output):
            # Many exporters leave output shapes out; the checker wants them.
            proto = onnx.shape_inference.infer_shapes(proto)
        share_opset(proto)
        version = opset_of(proto.opset_import)
        refuse_unknown(proto, version)
        # Exporters used it, although its first form, with a scale per group, was deprecated from the start.
        whole = expand(proto, ["GroupNormalization"]) if 18 <= version < OPSET else proto
        expanded = whole is not proto
        onnx.checker.check_model(whole)
        whole, functions, inlined = inline_unknown(whole)
        if version < OPSET:
            proto = raise_opset(whole, version)
        else:
            proto = lower_opset(whole, version)
            expanded = proto is not whole
        stamp(proto.opset_import, OPSET)
        proto.ir_version = IR_VERSION
        for node in standard_nodes(proto.graph.node):
            schema = defs.get_schema(node.op_type, OPSET, "")
            if has_body(schema):
                # Inference may go through the body, which reads them.
                write_out_defaults(node, schema)
        proto.functions.extend(functions)
        proto = _separate_branches(proto)
        proto = onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True)
        model = ir.from_proto(proto)
        refuse_unsupported(model)
    except ModelImportError:
        raise
    except Exception as error:
        # The C++ checker, inliner and inference each have their own exceptions, RuntimeError among them.
        raise ModelImportError(f"not a valid ONNX model: {error}") from error
    common.RemoveInitializersFromInputsPass()(model)
    common.NameFixPass()(model)
    _name_dimensions(model)
    record_parameters(model, parameter_names(model) if parameters is None else parameters)
    if expanded:
        simplify(model, keep=parameter_names(model))  # bodies compute what the shapes settle
    record_inlined(model.graph, inlined)
    return model


def _separate_branches(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Give every value its own name, where two branches of an If may share some: inference takes them for one."""
    if not any(proto_bodies(node) for node in proto.graph.node):
        return proto
    model = ir.from_proto(proto)
    taken: set[str] = set()
    for graph in levels(model.graph):
        for value in list(values(graph)):
            name, count = value.name or "", 1
            while value.name and value.name in taken:
                count += 1
                value.name = f"{name}_{count}"
            taken.add(value.name or "")
    return ir.to_proto(model)


def _require_tensors(graph: onnx.GraphProto) -> None:
    for sparse in graph.sparse_initializer:
        raise ModelImportError(f"the weight {sparse.values.name!r} is sparse; export it as a dense tensor")
    weights = {tensor.name for tensor in graph.initializer}
    for kind, ports in (("input", graph.input), ("output", graph.output)):
        for value in ports:
            if value.name in weights:
                continue
            form = value.type.WhichOneof("value")
            if form != "tensor_type":
                raise ModelImportError(
                    f"{kind} {value.name!r} is not a tensor but {form or 'untyped'}; give it as tensors, one for each "
                    "part, when exporting"
                )
            if kind == "input" and not value.type.tensor_type.HasField("shape"):
                raise ModelImportError(f"input {value.name!r} has no shape; declare one (names for free sizes)")


def _name_dimensions(model: ir.Model) -> None:
    # An unnamed size equals nothing, not even itself; with a name, shapes can be compared.
    for value in model.graph.inputs:
        if value.shape is not None:
            value.shape = ir.Shape(
                [
                    ir.SymbolicDim(f"{value.name}_dim{i}") if isinstance(d, ir.SymbolicDim) and not d.value else d
                    for i, d in enumerate(value.shape)
                ]
            )
