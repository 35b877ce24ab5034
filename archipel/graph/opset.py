"""One internal opset: every source is brought to opset 21 / IR version 10."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import onnx.version_converter
from onnx import defs

from archipel.errors import ModelImportError

OPSET = 21
IR_VERSION = 10
STANDARD_DOMAINS = ("", "ai.onnx")


def upgrade(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Bring a model without local functions to OPSET. Raises ModelImportError where an operator cannot come along.

    Most models need no conversion: if every operator means the same in both opsets, only the stamp changes, and
    nothing is lost on the way through the converter's own graph.
    """
    version = _opset_of(proto)
    if not 1 <= version <= defs.onnx_opset_version():
        raise ModelImportError(
            f"the model uses opset {version}; the onnx package here knows 1 to {defs.onnx_opset_version()}"
        )
    if version != OPSET:
        changed = sorted({op for op in _op_types(proto.graph) if _meaning(op, version) != _meaning(op, OPSET)})
        if changed:
            try:
                proto = onnx.version_converter.convert_version(proto, OPSET)
            except Exception as error:
                raise ModelImportError(
                    f"cannot convert from opset {version} to {OPSET} (operators that changed: {', '.join(changed)}): "
                    f"{error}"
                ) from error
        for entry in proto.opset_import:
            if entry.domain in STANDARD_DOMAINS:
                entry.domain, entry.version = "", OPSET
    if not any(entry.domain == "" for entry in proto.opset_import):
        proto.opset_import.append(onnx.helper.make_opsetid("", OPSET))
    proto.ir_version = IR_VERSION
    return proto


def _opset_of(proto: onnx.ModelProto) -> int:
    versions = {entry.version for entry in proto.opset_import if entry.domain in STANDARD_DOMAINS}
    if len(versions) > 1:
        raise ModelImportError(f"the model imports several versions of the standard opset: {sorted(versions)}")
    return versions.pop() if versions else OPSET


def _op_types(graph: onnx.GraphProto) -> Iterator[str]:
    for node in graph.node:
        if node.domain in STANDARD_DOMAINS:
            yield node.op_type
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _op_types(attribute.g)
            for subgraph in attribute.graphs:
                yield from _op_types(subgraph)


def _meaning(op_type: str, version: int) -> int | None:
    """Since which opset the operator means what it means in `version`; None if it does not exist there."""
    try:
        schema = defs.get_schema(op_type, version, "")
    except defs.SchemaError:
        return None
    return None if schema.deprecated else schema.since_version
