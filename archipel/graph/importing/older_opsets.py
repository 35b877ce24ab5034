"""From older opsets up: onnx's version converter, with its mistakes corrected or their models refused."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.version_converter
from onnx import helper, numpy_helper

from archipel.errors import ModelImportError
from archipel.graph.opset import OPSET, difference, standard_nodes
from archipel.library_errors import one_line

# Up to this opset the converter changes the meaning of the operator.
_MISTAKEN = {"Resize": 10, "Dropout": 11}


def raise_opset(proto: onnx.ModelProto, version: int) -> onnx.ModelProto:
    """Bring a model of opset `version` < OPSET, without local functions, up. Raises ModelImportError.

    If every operator means the same in both opsets, the converter is not used: its own graph form loses some details.
    """
    _leave_out_empty_inputs(proto)
    for node in standard_nodes(proto.graph.node):
        _refuse(node, version)
    changed = {node.op_type for node in standard_nodes(proto.graph.node) if difference(node, version)}
    if changed:
        # Read before the conversion, applied after it: the converter drops what Resize needs to be told.
        resized = _rounding(proto, version)
        if version <= _MISTAKEN["Dropout"]:
            _drop_masks(proto)
        try:
            proto = onnx.version_converter.convert_version(proto, OPSET)
        except Exception as error:
            raise ModelImportError(
                f"cannot convert from opset {version} to {OPSET} (operators that changed: "
                f"{', '.join(sorted(changed))}): {one_line(error)}; export the model at opset {OPSET}"
            ) from error
        for node in standard_nodes(proto.graph.node):
            if node.op_type == "Resize" and node.output[0] in resized:
                rounding = resized[node.output[0]]
                node.attribute.append(helper.make_attribute("coordinate_transformation_mode", "asymmetric"))
                node.attribute.append(helper.make_attribute("nearest_mode", rounding))
    return proto


def _rounding(proto: onnx.ModelProto, version: int) -> dict[str, str]:
    """Output of each Upsample and Resize of opset 10 or below -> the `nearest_mode` with which Resize does the same.

    Both map coordinates by scale alone. Upsample-9 rounds down; Resize-10 does not say, and runtimes round down where
    it enlarges and up where it shrinks.
    """
    if version > _MISTAKEN["Resize"]:
        return {}
    constants = {tensor.name: tensor for tensor in proto.graph.initializer}
    for node in standard_nodes(proto.graph.node):
        if node.op_type == "Constant":
            constants[node.output[0]] = node.attribute[0].t
    modes: dict[str, str] = {}
    for node in standard_nodes(proto.graph.node):
        if node.op_type not in ("Upsample", "Resize"):
            continue
        # Only a nearest Resize rounds; in linear mode `nearest_mode` has no effect.
        rounding = "floor"
        if node.op_type == "Resize" and _attribute(node, "mode") in (None, b"nearest"):
            tensor = constants.get(node.input[1])
            scales = np.empty(0) if tensor is None else numpy_helper.to_array(tensor)
            if not (all(scales <= 1) or all(scales >= 1)) or tensor is None:
                why = "are computed" if tensor is None else "shrink one axis and enlarge another"
                raise ModelImportError(
                    f"Resize {node.name!r} (opset {version}) has mode=nearest, and its scales {why}: runtimes may "
                    "round differently; export the model at opset 11 or above"
                )
            rounding = "ceil" if any(scales < 1) else "floor"
        if modes.setdefault(node.output[0], rounding) != rounding:
            raise ModelImportError(f"two values are called {node.output[0]!r}; give each its own name")
    return modes


def _leave_out_empty_inputs(proto: onnx.ModelProto) -> None:
    """Up to opset 12 an empty tensor stood for a roi or scales that a Resize leaves out; now an empty name does."""
    empty = {tensor.name for tensor in proto.graph.initializer if 0 in tensor.dims}
    for node in standard_nodes(proto.graph.node):
        if node.op_type == "Resize":
            for index in range(1, min(3, len(node.input))):
                if node.input[index] in empty:
                    node.input[index] = ""


def _drop_masks(proto: onnx.ModelProto) -> None:
    """Remove Dropout's mask output if nothing reads it, else refuse: later opsets changed its type or content."""
    # Names are compared across all levels: a body may read the mask, and a name used twice only errs on the safe side.
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
    """Raise ModelImportError for nodes whose meaning the converter would change, and this file does not correct."""
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
