"""From older opsets up: through the version converter, with what it gets wrong set right or refused."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.version_converter
from onnx import helper, numpy_helper

from archipel.errors import ModelImportError
from archipel.graph.opset import OPSET, difference, standard_nodes

# The last opset at which the converter mistakes an operator.
_MISTAKEN = {"Resize": 10, "Dropout": 11}


def raise_opset(proto: onnx.ModelProto, version: int) -> onnx.ModelProto:
    """Bring a model of opset `version` < OPSET up; it has no local functions. Raises ModelImportError.

    Most models need no conversion: if every operator means the same in both opsets, only the stamp changes, and
    nothing is lost on the way through the converter's own graph.
    """
    _leave_out_empty_inputs(proto)
    for node in standard_nodes(proto.graph.node):
        _refuse(node, version)
    changed = {node.op_type for node in standard_nodes(proto.graph.node) if difference(node, version)}
    if changed:
        resized = _rounding(proto, version)
        if version <= _MISTAKEN["Dropout"]:
            _drop_masks(proto)
        try:
            proto = onnx.version_converter.convert_version(proto, OPSET)
        except Exception as error:
            raise ModelImportError(
                f"cannot convert from opset {version} to {OPSET} (operators that changed: "
                f"{', '.join(sorted(changed))}): {error}; export the model at opset {OPSET}"
            ) from error
        for node in standard_nodes(proto.graph.node):
            if node.op_type == "Resize" and node.output[0] in resized:
                rounding = resized[node.output[0]]
                node.attribute.append(helper.make_attribute("coordinate_transformation_mode", "asymmetric"))
                node.attribute.append(helper.make_attribute("nearest_mode", rounding))
    return proto


def _rounding(proto: onnx.ModelProto, version: int) -> dict[str, str]:
    """Output of each Upsample and Resize until opset 10 -> the `nearest_mode` that says today what they did.

    Both mapped coordinates by scale alone. Upsample-9 rounds down; Resize-10 leaves it open, runtimes round down where
    it enlarges and up where it shrinks.
    """
    if version > _MISTAKEN["Resize"]:
        return {}
    constants = {tensor.name: tensor for tensor in proto.graph.initializer}
    for node in standard_nodes(proto.graph.node):
        if node.op_type == "Constant":
            constants[node.output[0]] = node.attribute[0].t
    found: dict[str, str] = {}
    for node in standard_nodes(proto.graph.node):
        if node.op_type not in ("Upsample", "Resize"):
            continue
        rounding = "floor"
        if node.op_type == "Resize" and _attribute(node, "mode") in (None, b"nearest"):
            tensor = constants.get(node.input[1])
            scales = np.empty(0) if tensor is None else numpy_helper.to_array(tensor)
            if not (all(scales <= 1) or all(scales >= 1)) or tensor is None:
                why = "are computed" if tensor is None else "shrink one axis and enlarge another"
                raise ModelImportError(
                    f"Resize {node.name!r} (opset {version}) takes the nearest, and its scales {why}: how that rounds "
                    "is not certain; export the model at opset 11 or above"
                )
            rounding = "ceil" if any(scales < 1) else "floor"
        if found.setdefault(node.output[0], rounding) != rounding:
            raise ModelImportError(f"two values are called {node.output[0]!r}; give each its own name")
    return found


def _leave_out_empty_inputs(proto: onnx.ModelProto) -> None:
    """Until opset 12 a Resize said with an empty tensor that it goes without roi or scales."""
    empty = {tensor.name for tensor in proto.graph.initializer if 0 in tensor.dims}
    for node in standard_nodes(proto.graph.node):
        if node.op_type == "Resize":
            for index in range(1, min(3, len(node.input))):
                if node.input[index] in empty:
                    node.input[index] = ""


def _drop_masks(proto: onnx.ModelProto) -> None:
    """Leave out Dropout's mask where nobody reads it: it has another type, or other content, in later opsets."""
    read = {name for node in standard_nodes(proto.graph.node) for name in node.input}
    read |= {value.name for value in proto.graph.output}
    for node in standard_nodes(proto.graph.node):
        if node.op_type == "Dropout" and len(node.output) > 1:
            if node.output[1] in read:
                raise ModelImportError(
                    f"Dropout {node.name!r}: its mask {node.output[1]!r} is used, which means something else in opset "
                    f"{OPSET}; export the model at opset 12 or above"
                )
            del node.output[1:]


def _refuse(node: onnx.NodeProto, version: int) -> None:
    """Raise ModelImportError for what the converter would change the meaning of, and nothing here sets right."""
    reason = None
    match node.op_type:
        case "Hardmax" if version <= 12:
            reason = "works on a flattened matrix there"
        case "PRelu" if version <= 6:
            reason = "takes its slopes along the channels there"
        case "Scan" if version <= 8:
            reason = "loops over a batch there"
        case "BatchNormalization" if version <= 13 and any(node.output[1:]):
            reason = "is in training mode (it has several outputs)"
        case "BatchNormalization" | "Dropout" if version <= 6 and not _attribute(node, "is_test"):
            reason = "is in training mode (is_test=0)"
        case "BatchNormalization" if version <= 8 and _attribute(node, "spatial") == 0:
            reason = "has statistics for each position (spatial=0)"
        case "Resize" if _attribute(node, "coordinate_transformation_mode") == b"tf_half_pixel_for_nn":
            reason = "has coordinate_transformation_mode=tf_half_pixel_for_nn"
    if reason is not None:
        raise ModelImportError(
            f"{node.op_type} {node.name!r} (opset {version}) {reason}, which cannot be converted to opset {OPSET}; "
            f"export the model for evaluation, at opset {OPSET}, if need be with another operator"
        )


def _attribute(node: onnx.NodeProto, name: str) -> object:
    return next((helper.get_attribute_value(a) for a in node.attribute if a.name == name), None)
