"""Attributes of nodes as short texts."""

from __future__ import annotations

import onnx_ir as ir

from archipel.graph.walk import bodies
from archipel.insight.limits import MAX_ATTRIBUTES, cut

_FEW = 16


def attribute_rows(node: ir.Node) -> list[tuple[str, str, str]]:
    """Name, type and text of each attribute of a node, MAX_ATTRIBUTES at most; of many numbers the first."""
    rows = []
    for name, attribute in list(node.attributes.items())[:MAX_ATTRIBUTES]:
        rows.append((cut(name), attribute.type.name.lower(), cut(_text(node, attribute))))
    return rows


def _text(node: ir.Node, attribute: ir.Attr) -> str:
    kind, types = attribute.type, ir.AttributeType
    value = attribute.value
    if attribute.ref_attr_name:
        return f"of the function: {attribute.ref_attr_name}"
    if kind in (types.GRAPH, types.GRAPHS):
        return f"{sum(len(body) for body in bodies(node))} nodes, in a scope of their own"
    if kind == types.TENSOR:
        return _tensor(value)
    if kind in (types.INTS, types.FLOATS, types.STRINGS):
        shown = ", ".join(_item(item) for item in value[:_FEW])
        more = f", and {len(value) - _FEW} more" if len(value) > _FEW else ""
        return f"[{shown}{more}]"
    if kind in (types.INT, types.FLOAT, types.STRING):
        return _item(value)
    return str(kind.name.lower())


def _item(item: object) -> str:
    if isinstance(item, float):
        return f"{item:.6g}"
    if isinstance(item, bytes):
        return item[:256].decode(errors="replace")
    return str(item)[:256] if isinstance(item, str) else str(item)


def _tensor(tensor: ir.TensorProtocol) -> str:
    shape = f"{tensor.dtype.name.lower()}[{', '.join(map(str, tensor.shape.numpy()))}]"
    if tensor.size <= _FEW and tensor.dtype != ir.DataType.STRING:
        return f"{shape} {tensor.numpy().tolist()}"
    return shape
