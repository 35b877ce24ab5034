"""`normalize`: brings any ONNX model to the internal opset, with every shape inferred and every dimension named."""

from __future__ import annotations

from collections.abc import Iterable

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common
from onnx import defs

from archipel.errors import ModelImportError
from archipel.graph.body_shapes import infer_graph
from archipel.graph.check import refuse_unknown, refuse_unsupported
from archipel.graph.functions import inline_unknown, record_inlined, refuse_too_many, share_opset
from archipel.graph.importing.bodies import forget_scalars, separate_bodies
from archipel.graph.importing.newer_opsets import expand, has_body, lower_opset, write_out_defaults
from archipel.graph.importing.older_opsets import raise_opset
from archipel.graph.importing.sources import MAX_BYTES, refuse_external
from archipel.graph.opset import IR_VERSION, OPSET, opset_of, stamp, standard_nodes
from archipel.graph.parameters import parameter_names, record_parameters
from archipel.graph.passes import simplify
from archipel.graph.walk import bodies
from archipel.library_errors import one_line


def normalize(proto: onnx.ModelProto, parameters: Iterable[str] | None = None) -> ir.Model:
    """Check a model, inline its functions, bring it to the internal opset, infer shapes, name every dimension.

    Arguments:
        proto: a model of opset 7 or above; it stays as it is.
        parameters: names of the initializers that are weights; by default the importer decides by how they are used.

    Raises ModelImportError that says what in the model is not supported.
    """
    if not proto.graph.output:
        raise ModelImportError("the model has no graph outputs")
    if proto.ByteSize() > MAX_BYTES:
        raise ModelImportError(f"the model has {proto.ByteSize()} bytes; at most {MAX_BYTES} are supported")
    # Limits come before onnx's checker, inliner and inference: a hostile model could make those use any time or memory.
    _require_tensors(proto.graph)
    refuse_external(proto)
    refuse_too_many(proto)
    # The caller's model stays as it is.
    original, proto = proto, onnx.ModelProto()
    proto.CopyFrom(original)
    try:
        proto = with_output_shapes(proto)
        share_opset(proto)
        version = opset_of(proto.opset_import)
        refuse_unknown(proto, version)
        # Exporters write the first form of GroupNormalization, which ONNX deprecates: it has a scale per group, that of
        # OPSET one per channel. Its function body takes its place.
        whole = expand(proto, ["GroupNormalization"]) if 18 <= version < OPSET else proto
        expanded = whole is not proto
        onnx.checker.check_model(whole)
        # Before the conversion, as `raise_opset` and `lower_opset` change nodes of graphs only.
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
                # Inference may expand the operator's function body, which reads all attributes.
                write_out_defaults(node, schema)
        proto.functions.extend(functions)
        proto = separate_bodies(proto)
        model = ir.from_proto(_with_shapes(proto))
        common.RemoveUnusedOpsetsPass()(model)  # tools declare all that they know, which no bundle may
        if any(bodies(node) for node in model.graph):
            infer_graph(model.graph)  # ONNX's inference says nothing about the shapes of a Loop's states
        refuse_unsupported(model)
    except ModelImportError:
        raise
    except Exception as error:
        # onnx's checker, inliner and inference each raise exceptions of their own, RuntimeError among them.
        raise ModelImportError(f"not a valid ONNX model: {one_line(error)}; export it again") from error
    common.RemoveInitializersFromInputsPass()(model)
    common.NameFixPass()(model)
    _name_dimensions(model)
    record_parameters(model, parameter_names(model) if parameters is None else parameters)
    if expanded:
        simplify(model, keep=parameter_names(model))  # function bodies compute shapes that are constants here
    record_inlined(model.graph, inlined)
    return model


def _with_shapes(proto: onnx.ModelProto) -> onnx.ModelProto:
    # ONNX's inference says nothing about the result of a GroupNormalization, which is as its input.
    norms = {}
    for node in standard_nodes(proto.graph.node):
        if node.op_type == "GroupNormalization":
            norms[node.output[0]] = node.SerializeToString()
            node.op_type = "Identity"
            del node.input[1:], node.attribute[:]
    inferred = _infer_strictly(proto)
    for node in standard_nodes(inferred.graph.node):
        if node.output and node.output[0] in norms:
            node.ParseFromString(norms[node.output[0]])
    return inferred


def _infer_strictly(proto: onnx.ModelProto) -> onnx.ModelProto:
    try:
        return onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True)
    except onnx.shape_inference.InferenceError:
        if not forget_scalars(proto):
            raise
    return onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True)


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


def with_output_shapes(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the shapes of its outputs, which many exporters leave out and onnx's checker requires.

    Raises ModelImportError for an output whose shape cannot be inferred.
    """

    def without_shape(value: onnx.ValueInfoProto) -> bool:
        return value.type.WhichOneof("value") == "tensor_type" and not value.type.tensor_type.HasField("shape")

    if not any(map(without_shape, proto.graph.output)):
        return proto
    proto = onnx.shape_inference.infer_shapes(proto)
    makers = {name: node for node in proto.graph.node for name in node.output}
    for value in filter(without_shape, proto.graph.output):
        node = makers.get(value.name)
        maker = "" if node is None else f" (of {node.op_type} {node.name!r})"
        raise ModelImportError(
            f"output {value.name!r}{maker} has no shape, and none can be inferred; write its shape into the file "
            "(names for free sizes), or export a loop unrolled or with carried values of one shape"
        )
    return proto


def free_name(value: ir.Value, axis: int) -> str:
    """The name of an input's symbolic size to which the file gives none."""
    return f"{value.name}_dim{axis}"


def _name_dimensions(model: ir.Model) -> None:
    # An unnamed size equals nothing, not even itself. Inference carries names on, so that shapes can be compared.
    for value in model.graph.inputs:
        if value.shape is not None:
            value.shape = ir.Shape(
                [
                    ir.SymbolicDim(free_name(value, i)) if isinstance(d, ir.SymbolicDim) and not d.value else d
                    for i, d in enumerate(value.shape)
                ]
            )
