"""One internal opset: every source is brought to opset 21 / IR version 10."""

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

# Attributes that only say something about types which OPSET does not have.
_WITHOUT_EFFECT = {("Cast", "round_mode"), ("CastLike", "round_mode"), ("Range", "stash_type")}

# Where leaving a new attribute out does not mean what the operator did before it had the attribute.
_CHANGED_DEFAULTS = {"RoiAlign", "Split"}


def opset_of(imports: Iterable[onnx.OperatorSetIdProto]) -> int:
    """The version of the standard opset. Raises ModelImportError for several, or one that the onnx package lacks."""
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
    """Make `version` the one standard opset of a model or function. `imports` is the protobuf field itself."""
    others = [(entry.domain, entry.version) for entry in imports if entry.domain not in STANDARD_DOMAINS]
    del imports[:]
    imports.extend(onnx.helper.make_opsetid(domain, number) for domain, number in [("", version), *others])


def standard_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Nodes of the standard domain, those inside subgraphs included."""
    return (node for node in proto_nodes(nodes) if node.domain in STANDARD_DOMAINS)


def difference(node: onnx.NodeProto, version: int, target: int = OPSET) -> str | None:
    """What keeps a node of opset `version` from meaning the same in `target`; None where nothing does.

    Compares the schemas. That one takes more types than the other is no difference: types are checked on the model.
    """
    before, after = _signature(node.op_type, version), _signature(node.op_type, target)
    if before is None or after is None:
        return f"does not exist in opset {version if before is None else target}"
    if before == after:
        return None
    used = [attribute.name for attribute in node.attribute]
    for given, old, new in ((node.input, before.inputs, after.inputs), (node.output, before.outputs, after.outputs)):
        count = len(given)
        same = [port.kind for port in old[:count]] == [port.kind for port in new[:count]]
        if not same or any(port.required for port in new[count:]):
            return f"has other inputs or outputs in opset {target}"
    if version < target:
        gone = before.defaults.keys() - after.defaults.keys()
        if node.op_type in _CHANGED_DEFAULTS or any(before.defaults[name] or name in used for name in gone):
            return f"has other attributes in opset {target}"
    for name in before.defaults.keys() & after.defaults.keys():
        if before.defaults[name] != after.defaults[name]:
            return f"has another default of {name} in opset {target}"
    for attribute in node.attribute:
        name = attribute.name
        if name in after.defaults or (node.op_type, name) in _WITHOUT_EFFECT:
            continue
        if attribute.SerializeToString(deterministic=True) != before.defaults.get(name):
            return f"has no attribute {name} in opset {target}"
    return None


class _Port(NamedTuple):
    """`kind`: name, whether it repeats, whether in one type."""

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
