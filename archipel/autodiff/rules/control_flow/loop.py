"""Loop."""

from __future__ import annotations

import onnx_ir as ir

from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Gradients, rule
from archipel.autodiff.rules.control_flow.form import Form, Series, State, WayBack
from archipel.autodiff.rules.control_flow.iteration import way_back
from archipel.autodiff.rules.control_flow.stacks import read_number
from archipel.graph.bodies import prepare
from archipel.graph.build import Builder
from archipel.graph.control import branch, emit_scan
from archipel.graph.shapes import constant_array


@rule("", "Loop")
def loop(ctx: RuleContext) -> Gradients:
    """A Scan backwards over the iterations that ran: what the forward loop stacked has as many items (ONNX Loop-21)."""
    node = ctx.node
    prepare(ctx.op, node)
    body = node.attributes["body"].as_graph()
    count = len(body.inputs) - 2
    form = Form(
        body=body,
        states=[State(body.inputs[2 + i], body.outputs[1 + i], 2 + i, node.outputs[i]) for i in range(count)],
        items=[],
        first=len(node.inputs),
        stacked=[
            Series(inside, result, 0, False) for inside, result in zip(body.outputs[1 + count :], node.outputs[count:])
        ],
        length=None,
    )
    back = way_back(ctx, form)
    gradients: list[ir.Value | None] = [None] * (len(ctx.inputs) + len(ctx.captured))
    if back is None:
        return gradients
    if not back.items:
        read_number(ctx, form, back)
    for index, value in zip(back.carried_of, _iterate(ctx, back, f"{body.name}/vjp")):
        if index is not None:
            gradients[index] = value
    return gradients


def _iterate(ctx: RuleContext, back: WayBack, name: str) -> list[ir.Value]:
    """What the loop of the gradient carries, after its last iteration."""
    if _runs(ctx):
        return emit_scan(ctx.op, back.op, back.carried, back.items, [], name=name)[0]
    # ONNX Runtime refuses a Scan without items.
    op, stacked = ctx.op, back.items[0]
    length = op.Shape(stacked.sequence, start=stacked.axis, end=stacked.axis + 1)
    ran = op.Greater(op.Squeeze(length, [0]), 0)

    def iterate(inner: Builder) -> list[ir.Value]:
        return emit_scan(inner, back.op, back.carried, back.items, [], name=name)[0]

    def pass_on(inner: Builder) -> list[ir.Value]:
        return [inner.Identity(each.initial) for each in back.carried]

    return branch(op, ran, iterate, pass_on, [each.initial for each in back.carried], name)


def _runs(ctx: RuleContext) -> bool:
    """Whether the loop certainly makes an iteration."""
    limit, condition = constant_array(ctx.optional(0)), constant_array(ctx.optional(1))
    if ctx.optional(0) is not None and (limit is None or int(limit.reshape(-1)[0]) < 1):
        return False
    return ctx.optional(1) is None or (condition is not None and bool(condition.reshape(-1)[0]))
