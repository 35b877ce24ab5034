"""The one internal opset, 21 (IR version 10), and what keeps an operator of another opset from meaning the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple

import onnx
from onnx import defs

from archipel.errors import ModelImportError
from archipel.graph.walk import proto_nodes

OPSET = 21
IR_VERSION = 10
STANDARD_DOMAINS = ("", "ai.onnx")

# Newer attributes that matter only for types which OPSET does not have.
_WITHOUT_EFFECT = {("Cast", "round_mode"), ("CastLike", "round_mode"), ("Range", "stash_type")}

# Operators that got a new attribute whose default does something else than the operator did without it.
_CHANGED_DEFAULTS = {"RoiAlign", "Split"}


def opset_of(imports: Iterable[onnx.OperatorSetIdProto]) -> int:
    """The version of the standard opset; OPSET if none is imported.

    Raises ModelImportError for several versions, or one that the onnx package does not know.
    """
    versions = {entry.version for entry in imports if entry.domain in STANDARD_DOMAINS}
    if len(versions) > 1:
        raise ModelImportError(f"the model imports several versions of the standard opset: {sorted(versions)}")
    version = versions.pop() if versions else OPSET
    if not 1 <= version <= defs.onnx_opset_version():
        raise ModelImportError(
            f"the model uses opset {version}; the onnx package here knows 1 to {defs.onnx_opset_version()}"
        )
    return version


def stamp(imports: list[onnx.OperatorSetIdProto], version: int) -> None:
    """Set the standard opset of a model or function. `imports` is its protobuf field, changed in place."""
    others = [(entry.domain, entry.version) for entry in imports if entry.domain not in STANDARD_DOMAINS]
    del imports[:]
    imports.extend(onnx.helper.make_opsetid(domain, number) for domain, number in [("", version), *others])


def standard_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Nodes of the standard domain, those inside subgraphs included."""
    return (node for node in proto_nodes(nodes) if node.domain in STANDARD_DOMAINS)


def difference(node: onnx.NodeProto, version: int, target: int = OPSET) -> str | None:
    """Why a node of opset `version` does not mean the same in `target`, as the end of a sentence; None if it does.

    Compares the schemas, except for the types that they accept: `refuse_unsupported` checks those on the model.
    """
    before, after = _signature(node.op_type, version), _signature(node.op_type, target)
    if before is None or after is None:
        return f"does not exist in opset {version if before is None else target}"
    if before == after:
        return None
    used = [attribute.name for attribute in node.attribute]
    for given, old, new in ((node.input, before.inputs, after.inputs), (node.output, before.outputs, after.outputs)):
        # The ports that the node uses must be the same, and further ones that the target has must be optional.
        count = len(given)
        same = [port.kind for port in old[:count]] == [port.kind for port in new[:count]]
        if not same or any(port.required for port in new[count:]):
            return f"has other inputs or outputs in opset {target}"
    # Upwards an attribute that is gone matters if it is set, or if it had a default to take effect.
    if version < target:
        gone = before.defaults.keys() - after.defaults.keys()
        if node.op_type in _CHANGED_DEFAULTS or any(before.defaults[name] or name in used for name in gone):
            return f"has other attributes in opset {target}"
    for name in before.defaults.keys() & after.defaults.keys():
        if before.defaults[name] != after.defaults[name]:
            return f"has another default of {name} in opset {target}"
    # An attribute that the target lacks may be set, if to the default, which is what the target does.
    for attribute in node.attribute:
        name = attribute.name
        if name in after.defaults or (node.op_type, name) in _WITHOUT_EFFECT:
            continue
        if attribute.SerializeToString(deterministic=True) != before.defaults.get(name):
            return f"has no attribute {name} in opset {target}"
    return None


class _Port(NamedTuple):
    """`kind`: name, whether it is variadic, whether all its values have one type."""

    kind: tuple[str, bool, bool]
    required: bool


class _Signature(NamedTuple):
    """What two versions of an operator must share to mean the same: attributes with their defaults, and ports."""

    defaults: dict[str, bytes]
    inputs: list[_Port]
    outputs: list[_Port]


@cache
def _signature(op_type: str, version: int) -> _Signature | None:
    try:
        schema = defs.get_schema(op_type, version, "")
    except defs.SchemaError:
        return None
    if schema.deprecated:
        return None
    defaults = {
        name: attribute.default_value.SerializeToString(deterministic=True)
        for name, attribute in schema.attributes.items()
    }
    return _Signature(defaults, _ports(schema.inputs), _ports(schema.outputs))


def _ports(formal: Iterable[defs.OpSchema.FormalParameter]) -> list[_Port]:
    option = defs.OpSchema.FormalParameterOption
    return [
        _Port((port.name.lower(), port.option == option.Variadic, port.is_homogeneous), port.option == option.Single)
        for port in formal
    ]
