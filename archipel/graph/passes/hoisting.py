"""What bodies compute from constants alone, once in the main graph."""

from __future__ import annotations

import onnx_ir as ir

from archipel.graph.build import Builder
from archipel.graph.passes.base import GraphPass
from archipel.graph.passes.constants import constant_values, is_repeatable, unpacks
from archipel.graph.walk import bodies, dependencies


class HoistConstants(GraphPass):
    """Move nodes of bodies that read nothing but constants of the main graph there, in front of the node with the body.

    A loop would run them in every iteration. In the main graph they are stored with the model, and what other passes do
    with constants (fold a factor into a weight) works for layers in bodies, too. Unpacking stays beside what reads it.
    """

    def change(self, model: ir.Model) -> bool:
        op, fixed = Builder(model.graph), constant_values(model.graph)
        moved = False
        for node in list(model.graph):
            for body in bodies(node):
                moved |= _hoist(op, node, body, fixed)
        return moved


hoist_constants = HoistConstants()


def _hoist(op: Builder, around: ir.Node, body: ir.Graph, fixed: set[ir.Value]) -> bool:
    moved = False
    for node in list(body):
        for inner in bodies(node):
            moved |= _hoist(op, around, inner, fixed)
        read = dependencies(node)
        constant = bool(read) and not bodies(node) and all(value in fixed for value in read)
        # The output of a body is computed in it.
        if not constant or not is_repeatable(node) or unpacks(node) or any(v.is_graph_output() for v in node.outputs):
            continue
        body.remove(node)
        node.name = op.unique(str(node.name))  # names of nodes need differ in one graph only
        op.graph.insert_before(around, node)
        fixed.update(node.outputs)
        moved = True
    return moved
