"""Checks that any ONNX runtime opens a graph, and refusals that name the node and the remedy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import onnx
import onnx_ir as ir
from onnx import defs

from archipel.errors import GraphError, ModelImportError
from archipel.graph.markers import MARKERS
from archipel.graph.opset import OPSET, STANDARD_DOMAINS, standard_nodes
from archipel.graph.parameters import parameter_names
from archipel.graph.shapes import constant_array, dims
from archipel.graph.walk import proto_nodes
from archipel.library_errors import one_line

_COMPLEX = (ir.DataType.COMPLEX64, ir.DataType.COMPLEX128)
_MASKING = frozenset({"Add", "Where", "Slice", "Unsqueeze", "Reshape", "Expand", "Cast", "Identity"})
_FLOATS = {"tensor(float)", "tensor(double)", "tensor(float16)", "tensor(bfloat16)"}


_OLD_EXPORT = "export the model again with a newer exporter, at opset 13 or above"
_CAFFE2 = "it was Caffe2's own; export the model again from PyTorch with torch.onnx.export"
_COREML = "it came with converters from Core ML; scale and crop pictures before the model"

# Experimental operators, and other tools' own under ONNX's name -> the remedy.
_GONE = {
    "ATen": "it stands for a PyTorch function that had no ONNX form; " + _OLD_EXPORT,
    "Affine": "write it as Mul and Add",
    "ConstantFill": "use ConstantOfShape; " + _OLD_EXPORT,
    "Crop": _COREML,
    "DynamicSlice": "use Slice, which takes computed bounds since opset 10; " + _OLD_EXPORT,
    "GRUUnit": _CAFFE2,
    "GivenTensorFill": _CAFFE2,
    "ImageScaler": _COREML,
    "ParametricSoftplus": "write it as Mul(alpha, Softplus(Mul(beta, x)))",
    "Scale": "write it as Mul and Add",
    "ScaledTanh": "write it as Mul(alpha, Tanh(Mul(beta, x)))",
    "SpatialBN": _CAFFE2,
}

# Start of a domain's name -> the remedy. The first that fits counts, so ai.onnx.ml is before ai.onnx.
_DOMAINS = {
    "ai.onnx.ml": "classical models are imported from the estimator, with Model.from_sklearn",
    "com.microsoft": "ONNX Runtime's optimizer wrote it; take the model as it was before, or save it with "
    "graph_optimization_level=ORT_ENABLE_BASIC",
    "com.ms": "ONNX Runtime's optimizer wrote it for one machine; take the model as it was before",
    "ai.onnx.": "export the model for inference",
    "org.pytorch": "it stands for a PyTorch function that had no ONNX form; export again with a newer PyTorch",
    "pkg.": "its exporter left out the body of the function; export again, with functions inlined",
}


def check_model(model: ir.Model) -> None:
    """Check that every node is a standard operator of the internal opset, or a marker of what gradients do, which is a
    function of such an operator; and that the model is valid ONNX.

    Raises GraphError that names the node.

    Example:
        check_model(model.ir)
    """
    for node in model.graph.all_nodes():
        if (node.domain, node.op_type) in MARKERS and node.op_identifier() in model.functions:
            continue
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
        raise GraphError(f"not valid ONNX: {one_line(error)}") from error


def refuse_unknown(proto: onnx.ModelProto, version: int) -> None:
    """Raise ModelImportError for a node of the standard domain that opset `version` does not have."""
    nodes = [*proto.graph.node, *(node for function in proto.functions for node in function.node)]
    for node in standard_nodes(nodes):
        if defs.has(node.op_type, version, ""):
            continue
        if node.op_type in _GONE:
            raise ModelImportError(f"{_title(node)} is no ONNX operator any more; {_GONE[node.op_type]}")
        if defs.has(node.op_type):
            since = defs.get_schema(node.op_type).since_version
            raise ModelImportError(
                f"{_title(node)} does not exist in opset {version}, which the model declares, but in others (the "
                f"newest form is of opset {since}); export the model again"
            )
        raise ModelImportError(
            f"{_title(node)} is no ONNX operator; write it with standard ones, or give it a body as a model-local "
            "function"
        )


def refuse_foreign(proto: onnx.ModelProto) -> None:
    """Raise ModelImportError for a node whose domain is not the standard one, unless the model has its body."""
    bodies = {(function.domain, function.name) for function in proto.functions}
    graphs = [proto.graph.node, *(function.node for function in proto.functions)]
    for node in (inner for nodes in graphs for inner in proto_nodes(nodes)):
        if node.domain in STANDARD_DOMAINS or (node.domain, node.op_type) in bodies:
            continue
        remedy = next(
            (text for domain, text in _DOMAINS.items() if node.domain.startswith(domain)),
            "write it with standard operators, or give it a body as a model-local function",
        )
        raise ModelImportError(f"{_title(node)} is of domain {node.domain!r}, not standard ONNX; {remedy}")


def refuse_types(model: ir.Model) -> None:
    """Raise ModelImportError for an input or output that is no tensor of numbers, which is all that programs read."""
    for kind, values in (("input", model.graph.inputs), ("output", model.graph.outputs)):
        for value in values:
            if value.dtype == ir.DataType.STRING:
                raise ModelImportError(
                    f"{kind} {value.name!r} is text (strings), and devices compute with numbers; export the model "
                    "without the part that reads or writes text, with token ids or class numbers in its place"
                )
            if value.type is not None and (not isinstance(value.type, ir.TensorType) or value.dtype in _COMPLEX):
                raise ModelImportError(
                    f"{kind} {value.name!r} is {value.type}, no tensor of real numbers; export the model with such "
                    "tensors, one for each part"
                )


def refuse_not_finite(model: ir.Model) -> None:
    """Raise GraphError for a parameter with an element that is not a number, or infinite.

    Minus infinity is allowed where it is only added or chosen, as in the mask of an attention.
    """
    for name in parameter_names(model):
        value = model.graph.initializers[name]
        content = constant_array(value)
        if content is None or content.dtype.kind != "f" or np.isfinite(content).all():
            continue
        masks = all(use.node.op_type in _MASKING for use in value.uses())
        wrong = ~np.isfinite(content) & ~(masks & np.isneginf(content))
        if not wrong.any():
            continue
        first = tuple(map(int, np.argwhere(wrong)[0]))
        raise GraphError(
            f"weight {name!r}: {int(wrong.sum())} of {content.size} elements are not finite, the first at "
            f"{list(first)} ({content[first]}); the training that made it diverged, or the file is damaged: export a "
            "checkpoint whose weights are finite"
        )


def refuse_unsupported(model: ir.Model) -> None:
    """Raise ModelImportError for uses that pass ONNX's checker although the internal opset does not define them.

    Element types that an operator does not take, Mod with fmod=0 of floating-point numbers (only opset 28 defines it),
    and pooling with a window inside the padding (opset 22 drops such windows; before, their result is undefined).
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
    """The schema's type parameters ("T") -> the node's type for each ("tensor(float)")."""
    schema = defs.get_schema(node.op_type, OPSET, "")
    bindings: dict[str, str] = {}
    for value, parameter in _parameters(node, schema):
        if value.dtype is None or not isinstance(value.type, ir.TensorType):
            continue
        given = f"tensor({value.dtype.name.lower()})"
        if given not in parameter.types:
            raise ModelImportError(
                f"{_title(node)}: {value.name!r} is {given}, which {node.op_type} does not take in opset {OPSET}; use "
                f"one of {', '.join(sorted(parameter.types))}"
            )
        # Values of one type parameter must agree; the first one binds it.
        if parameter.is_homogeneous and bindings.setdefault(parameter.type_str, given) != given:
            raise ModelImportError(
                f"{_title(node)}: {value.name!r} is {given} where {bindings[parameter.type_str]} is needed, the type "
                "of the others; put a Cast between"
            )
    return bindings


def _refuse_empty_windows(node: ir.Node) -> None:
    # The last window starts at (count - 1) * stride; the input ends at size + before, counted from the padding's start.
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
    """The value of an integer attribute as a list; empty if it is absent or 0."""
    attribute = node.attributes.get(name)
    value = [] if attribute is None else attribute.value
    return list(value) if isinstance(value, Sequence) else [value] * bool(value)


def _title(node: ir.Node | onnx.NodeProto) -> str:
    return f"{node.op_type} {node.name!r}"


def _parameters(node: ir.Node, schema: defs.OpSchema) -> Iterator[tuple[ir.Value, defs.OpSchema.FormalParameter]]:
    for values, formal in ((node.inputs, schema.inputs), (node.outputs, schema.outputs)):
        for index, value in enumerate(values):
            if value is not None:
                yield value, formal[min(index, len(formal) - 1)]  # the last one may repeat
