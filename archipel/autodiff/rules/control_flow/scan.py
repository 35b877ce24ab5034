"""Scan."""

from __future__ import annotations

import onnx_ir as ir

from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Gradients, rule
from archipel.autodiff.rules.control_flow.form import Form, Series, State
from archipel.autodiff.rules.control_flow.iteration import way_back
from archipel.graph.bodies import prepare
from archipel.graph.control import Item, body_value, emit_scan
from archipel.graph.shapes import dims


@rule("", "Scan")
def scan(ctx: RuleContext) -> Gradients:
    """A Scan over the same sequences and what the forward one keeps, in the opposite direction (ONNX Scan-21)."""
    node = ctx.node
    prepare(ctx.op, node)
    body = node.attributes["body"].as_graph()
    count = ctx.attribute("num_scan_inputs", 0)
    first = len(node.inputs) - count
    results = len(body.outputs) - first

    def series(kind: str, length: int) -> list[tuple[int, bool]]:
        axes = ctx.attribute(f"scan_{kind}_axes", [0] * length)
        return [(axis, bool(back)) for axis, back in zip(axes, ctx.attribute(f"scan_{kind}_directions", [0] * length))]

    sequences = [ctx.input(first + i) for i in range(count)]
    read = [
        Series(inside, sequence, *how)
        for inside, sequence, how in zip(body.inputs[first:], sequences, series("input", count))
    ]
    form = Form(
        body=body,
        states=[State(body.inputs[i], body.outputs[i], i, node.outputs[i]) for i in range(first)],
        items=read,
        first=first,
        stacked=[
            Series(inside, result, *how)
            for inside, result, how in zip(body.outputs[first:], node.outputs[first:], series("output", results))
        ],
        length=dims(sequences[0])[read[0].axis],
    )
    back = way_back(ctx, form)
    gradients: list[ir.Value | None] = [None] * (len(ctx.inputs) + len(ctx.captured))
    if back is None:
        return gradients
    if not back.items:  # nothing of the way there is needed but how many iterations there were
        first_one = body_value(back.op, f"{body.name}/item", sequences[0], skip=read[0].axis)
        back.items.append(Item(first_one, sequences[0], read[0].axis))
    carried, stacked = emit_scan(ctx.op, back.op, back.carried, back.items, back.stacked, name=f"{body.name}/vjp")
    for index, value in [*zip(back.carried_of, carried), *zip(back.stacked_of, stacked)]:
        if index is not None:
            gradients[index] = value
    return gradients
