"""If."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Gradients, rule
from archipel.autodiff.reverse import pull_back
from archipel.autodiff.rules.control_flow.kept import UNREAD, read_shapes_elsewhere, show_masks, values_to_keep
from archipel.graph.bodies import copy_body, prepare, remove_unneeded, widen
from archipel.graph.build import Builder
from archipel.graph.control import emit_if
from archipel.graph.shapes import complete_shape, dims, dtype_of, is_float, same_shape


@rule("", "If")
def conditional(ctx: RuleContext) -> Gradients:
    """An If on the same condition. Each of its branches computes the branch again, but for what is expensive, and then
    the gradients of the values that it captures (ONNX If-21)."""
    op, node = ctx.op, ctx.node
    prepare(op, node)
    names = ("then_branch", "else_branch")
    wanted = [value for i, value in enumerate(ctx.captured, start=len(ctx.inputs)) if ctx.wants(i)]
    branches = [_Branch.of(ctx, node.attributes[name].as_graph(), wanted) for name in names]
    # A value that neither branch has a gradient for gets none, so that an error can say so where there should be one.
    found = [value for value in wanted if any(branch.gradients[value] is not None for branch in branches)]
    if not found:
        return [None]
    for branch in branches:
        branch.finish(found)
    for branch, other in (branches, branches[::-1]):
        branch.keep(ctx, other)
    results = emit_if(op, ctx.input(0), branches[0].op.graph, branches[1].op.graph, like=found)
    gradients = dict(zip(found, results))
    return [None, *(gradients.get(value) for value in ctx.captured)]


@dataclass
class _Branch:
    """A branch of the forward node, its copy that computes gradients, and these for each captured value."""

    body: ir.Graph
    op: Builder
    copies: dict[ir.Value, ir.Value]
    gradients: dict[ir.Value, ir.Value | None]

    @classmethod
    def of(cls, ctx: RuleContext, body: ir.Graph, wanted: list[ir.Value]) -> _Branch:
        show_masks(ctx.op, body)
        inner, copies = copy_body(ctx.op, body, f"{body.name}/vjp")
        seeds = {}
        for output, cotangent in zip(body.outputs, ctx.cotangents):
            if cotangent is not None and is_float(output):
                seeds[copies[output]] = shaped(inner, cotangent, copies[output])
        return cls(body, inner, copies, dict(zip(wanted, pull_back(inner, seeds, wanted))))

    def finish(self, found: list[ir.Value]) -> None:
        """Make the gradients the outputs of the copy; zeros for what this branch does not depend on."""
        for value in found:
            gradient = self.gradients[value]
            result = self.op.full_like(value, 0.0) if gradient is None else gradient
            complete_shape(result, value)
            self.op.name_output(result, self.op.unique(f"{value.name}/grad"))
        read_shapes_elsewhere(self.copies, self.op.graph, found)
        remove_unneeded(self.op.graph, self.op.graph.outputs)

    def keep(self, ctx: RuleContext, other: _Branch) -> None:
        """Have the forward node return what is expensive to compute again; in the other branch that is empty."""
        for value in values_to_keep(ctx, self.copies, self.op.graph.outputs, lambda value: value.shape is not None):
            empty = Builder(other.body, outer=ctx.op)
            nothing = empty.ConstantOfShape(
                empty.constant([0] * len(dims(value))), value=ir.tensor([0], dtype=dtype_of(value))
            )
            other.body[-1].metadata_props[UNREAD] = ""
            result = widen(ctx.op, ctx.node, [(self.body, value), (other.body, nothing)])
            result.type, result.shape = value.type, ir.Shape([None] * len(dims(value)))
            copy = self.copies[value]
            uses = list(copy.uses())
            with self.op.before(self.op.graph[0]):
                inside = shaped(self.op, result, value)
            for use in uses:
                use.node.replace_input_with(use.idx, inside)
        remove_unneeded(self.op.graph, self.op.graph.outputs)


def shaped(op: Builder, value: ir.Value, like: ir.Value) -> ir.Value:
    """Reshape the value to the sizes of `like`, where a branch knows more of them than the graph around it and at most
    one is not a number. An Identity would not do: inference would take the sizes of what it reads."""
    sizes = dims(like)
    if len(sizes) != len(dims(value)):
        return op.reshape_like(value, like)  # exporters write a Squeeze in one branch and an Identity in the other
    if same_shape(dims(value), sizes) or sum(not isinstance(size, int) for size in sizes) > 1 or 0 in sizes:
        return value
    return op.reshape_like(value, like)
