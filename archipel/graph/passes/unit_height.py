"""Convolutions over one axis, as convolutions over pictures of height 1."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx_ir as ir

from archipel.graph.build import Builder
from archipel.graph.passes.base import LevelPass
from archipel.graph.passes.constants import constant_values, is_unpacked
from archipel.graph.passes.replacement import take_over
from archipel.graph.shapes import constant_array, dims, is_float, is_static

_AXIS = 2
_WINDOWS = frozenset({"Conv", "ConvTranspose", "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"})
_BETWEEN = frozenset(
    {"Relu", "LeakyRelu", "Elu", "Selu", "Celu", "Sigmoid", "Tanh", "HardSigmoid", "HardSwish", "Softplus", "Softsign"}
    | {"Mish", "Gelu", "Erf", "Abs", "Neg", "Exp", "Sqrt", "Clip", "Identity", "BatchNormalization"}
    | {"Add", "Mul", "Sub", "Div"}
)
_PAIRWISE = frozenset({"Add", "Mul", "Sub", "Div"})
# Attribute -> its value for the new axis, which comes before the other spatial axes.
_LISTS = {"kernel_shape": 1, "strides": 1, "dilations": 1, "output_padding": 0}

_BLOCK = 8  # channels of a block in ONNX Runtime's layout; only layers of whole blocks count as work that gains
_WORTH = 600_000
"""FLOPs of a group of layers for each Unsqueeze or Squeeze at its ends, below which these nodes cost more than the
layout saves. Found by trial."""


class AddUnitHeight(LevelPass):
    """Give convolutions over [batch, channels, length], and the nodes between them, a height of 1.

    ONNX Runtime's blocked layout is for two spatial axes only (`benchmarks/predict_passes.py --without` prints what it
    saves). An Unsqueeze gives weights the axis, so their content stays. Skipped are groups with too little work for the
    nodes that their ends need, and layers whose weights are stored in a small form.
    """

    def change_level(self, op: Builder) -> bool:
        fixed = constant_values(op.main)
        candidates = [node for node in op.graph if _fits(node, fixed)]
        modified = False
        for group in _connected(candidates):
            if _pays(group):
                _lift(op, group)
                modified = True
        return modified


add_unit_height = AddUnitHeight()


def _fits(node: ir.Node, fixed: set[ir.Value]) -> bool:
    if node.domain != "" or node.op_type not in _WINDOWS | _BETWEEN or len(node.outputs) != 1:
        return False
    values = [*node.inputs[:1], *node.outputs]
    if any(value is None or value.shape is None or len(value.shape) != 3 or not is_float(value) for value in values):
        return False
    if node.op_type in ("Conv", "ConvTranspose"):
        weight = node.inputs[1]
        # An Unsqueeze of a computed weight would run in every prediction.
        return weight in fixed and not is_unpacked(weight) and weight.shape is not None and is_static(dims(weight))
    # The other operand gets the axis as well, or is one number. One of rank 2, [channels, 1], would meet other axes.
    if node.op_type in _PAIRWISE:
        return all(
            value is not None and value.shape is not None and (len(value.shape) == 3 or math.prod(_known(value)) == 1)
            for value in node.inputs
        )
    return node.inputs[0] not in fixed


def _known(value: ir.Value) -> list[int]:
    return [d if isinstance(d, int) else 0 for d in dims(value)]


def _connected(nodes: list[ir.Node]) -> list[list[ir.Node]]:
    """The connected groups of these nodes along their edges, each in the graph's order."""
    members = set(nodes)
    group_of: dict[ir.Node, list[ir.Node]] = {}
    for node in nodes:
        # A node that reads from several groups joins them into one.
        merged = [node]
        before = [value.producer() for value in node.inputs if value is not None]
        for group in {id(g): g for n in before if n in members and n is not None for g in [group_of[n]]}.values():
            merged += group
        for member in merged:
            group_of[member] = merged
    places = {node: place for place, node in enumerate(nodes)}
    groups = {id(group): sorted(group, key=places.__getitem__) for group in group_of.values()}
    return list(groups.values())


def _pays(group: list[ir.Node]) -> bool:
    """Whether the group's convolutions do enough work for the Unsqueeze and Squeeze nodes at its ends."""
    members = set(group)
    work = 0
    for node in group:
        if node.op_type in ("Conv", "ConvTranspose") and node.inputs[1] is not None:
            channels, length = dims(node.outputs[0])[1:]
            if not isinstance(channels, int) or channels % _BLOCK:
                continue
            # A symbolic length counts as one at which a layer pays for itself.
            work += 2 * math.prod(_known(node.inputs[1])) * (length if isinstance(length, int) else _WORTH)
    # An Unsqueeze for each value that enters the group, a Squeeze for each that leaves it.
    inside = {node.outputs[0] for node in group}
    entries = {value for node in group for value in _spatial(node) if value not in inside}
    exits = sum(any(not _takes_either(use, members) for use in value.uses()) for value in inside)
    exits += sum(value.is_graph_output() for value in inside)
    return work > _WORTH * (len(entries) + exits)


def _spatial(node: ir.Node) -> list[ir.Value]:
    """The inputs [batch, channels, length], which get the axis; constants as well."""
    values = node.inputs if node.op_type in _PAIRWISE else node.inputs[:1]
    return [value for value in values if value is not None and value.shape is not None and len(value.shape) == 3]


def _takes_either(use: Any, members: set[ir.Node]) -> bool:
    """Whether a reader gives the same result with the axis: members, a Reshape whose target copies no size from the new
    axis on, and a Flatten at or before it."""
    node = use.node
    if node in members:
        return True
    if node.domain != "" or use.idx != 0:
        return False
    if node.op_type == "Reshape":
        target = constant_array(node.inputs[1])
        return target is not None and all(int(d) for d in target[_AXIS:])
    axis = node.attributes.get_int("axis", 1)
    return node.op_type == "Flatten" and axis in range(_AXIS + 1)


def _lift(op: Builder, group: list[ir.Node]) -> None:
    members = set(group)
    high: dict[ir.Value, ir.Value] = {}
    axes = np.array([_AXIS], np.int64)
    for node in group:
        inputs: list[ir.Value | None] = list(node.inputs)
        with op.before(node), op.scope(node.name or node.op_type):
            for value in _spatial(node):
                # Values of the group are there already, as `group` is in the graph's order.
                if value not in high:
                    high[value] = op.Unsqueeze(value, axes)
            if node.op_type in ("Conv", "ConvTranspose"):
                inputs[1] = op.Unsqueeze(node.inputs[1], axes)
            inputs = [value if value is None else high.get(value, value) for value in inputs]
            result = op(node.op_type, *inputs, **_attributes(node))
        high[node.outputs[0]] = result
    for node in group:
        low = node.outputs[0]
        for use in list(low.uses()):
            if use.node not in members and _takes_either(use, members):
                use.node.replace_input_with(use.idx, high[low])
        if low.is_graph_output() or any(use.node not in members for use in low.uses()):
            with op.after(node), op.scope(node.name or node.op_type):
                back = op.Squeeze(high[low], axes)
            back.shape = low.shape
            _replace_outside(op, low, back, members)
    # Readers first: onnx_ir removes only nodes whose results nothing reads.
    for node in reversed(group):
        node.graph.remove(node, safe=True)  # type: ignore[union-attr]


def _replace_outside(op: Builder, low: ir.Value, back: ir.Value, members: Iterable[ir.Node]) -> None:
    for use in list(low.uses()):
        if use.node not in members:
            use.node.replace_input_with(use.idx, back)
    if low.is_graph_output():
        take_over(op, low, back)


def _attributes(node: ir.Node) -> dict[str, Any]:
    """The node's attributes, with values for the new axis."""
    values = {name: attribute.value for name, attribute in node.attributes.items()}
    for name, new in _LISTS.items():
        if name in values:
            values[name] = [new, *values[name]]
    if "pads" in values:
        before, after = values["pads"]
        values["pads"] = [0, before, 0, after]
    if "output_shape" in values:
        values["output_shape"] = [1, *values["output_shape"]]
    return values
