"""Which operators, with which types, ONNX Runtime's CPU build has kernels for, as it says itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cache

import onnx
import onnx_ir as ir
from onnx import defs
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_opkernel_def

from archipel.graph.importing.newer_opsets import expand, has_body
from archipel.graph.opset import OPSET

Kernel = tuple[tuple[int, int], dict[str, list[str]]]
"""Opset versions from and to, and the types for each type parameter."""


@cache
def kernels() -> dict[str, list[Kernel]]:
    found: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in get_all_opkernel_def():
        if kernel.provider == "CPUExecutionProvider" and kernel.domain == "":
            found[kernel.op_name].append((kernel.version_range, kernel.type_constraints))
    return found


def without_kernel(model: ir.Model) -> list[str]:
    """The nodes, those in subgraphs included, that the CPU build could not run: operator and types of each.

    ONNX Runtime runs an operator without kernel through the function body of its schema; so it is done here.
    """
    while True:
        bare = [node for node in model.graph.all_nodes() if not _has_kernel(node)]
        bodies = {node.op_type for node in bare if has_body(defs.get_schema(node.op_type, OPSET, ""))}
        if not bodies:
            return [describe(node) for node in bare]
        expanded = expand(ir.to_proto(model), bodies)
        model = ir.from_proto(onnx.shape_inference.infer_shapes(expanded, data_prop=True))


def describe(node: ir.Node) -> str:
    return f"{node.op_type}({', '.join(str(value.dtype) for value in node.inputs if value is not None)})"


def _has_kernel(node: ir.Node) -> bool:
    if node.op_type == "Constant":
        return True  # becomes an initializer
    schema = defs.get_schema(node.op_type, OPSET, node.domain)
    types = dict(_types(node, schema))
    return any(
        first <= schema.since_version <= last
        and all(types[name] in allowed for name, allowed in constraints.items() if name in types)
        for (first, last), constraints in kernels()[node.op_type]
    )


def _types(node: ir.Node, schema: defs.OpSchema) -> Iterator[tuple[str, str]]:
    """Type parameter and type of each input, and of each output that is read. Every type must be known."""
    for values, formal in ((node.inputs, schema.inputs), (node.outputs, schema.outputs)):
        for index, value in enumerate(values):
            if value is not None and value.name and (value.uses() or value.producer() is not node):
                assert value.dtype is not None, f"{describe(node)}: the type of {value.name!r} is not known"
                yield formal[min(index, len(formal) - 1)].type_str, f"tensor({value.dtype.name.lower()})"
