"""What Scan and Loop share: the gradient of one iteration, around which each rule puts its loop.

The way there keeps the states before each iteration, stacked; the way back goes through them from the last to the
first, with the cotangents of the states and the sums for captured values as its states.
"""

from __future__ import annotations

import onnx_ir as ir

from archipel.autodiff.activity import active_inside, needed_inside
from archipel.autodiff.context import RuleContext
from archipel.autodiff.reverse import pull_back
from archipel.autodiff.rules.control_flow.form import Form, Series, State, WayBack
from archipel.autodiff.rules.control_flow.kept import show_masks
from archipel.autodiff.rules.control_flow.stacks import read_kept
from archipel.graph.bodies import copy_body
from archipel.graph.build import Builder
from archipel.graph.control import Carried, Item, Stacked, body_value
from archipel.graph.shapes import dims, is_float
from archipel.graph.walk import flows


def way_back(ctx: RuleContext, form: Form) -> WayBack | None:
    """Emit the body of the gradient; None if no gradient arrives at any input or captured value."""
    live, active = _live_states(ctx, form)
    show_masks(ctx.op, form.body)
    back = WayBack(*copy_body(ctx.op, form.body, f"{form.body.name}/vjp"))
    inner, copies = back.op, back.copies
    for value in form.body.inputs:
        _name_sizes(inner, copies[value])
    # Cotangents of the states after the iteration, and of what it stacks.
    seeds: dict[ir.Value, ir.Value] = {}
    after = [body_value(inner, f"{state.inside.name}/cotangent", copies[state.inside]) for state in live]
    for state, cotangent in zip(live, after):
        _add(inner, seeds, copies[state.following], cotangent)
    for each, given in _stacked_cotangents(ctx, form):
        if each.inside in active:
            item = body_value(inner, f"{each.inside.name}/cotangent", given, skip=each.axis)
            back.items.append(Item(item, given, each.axis, not each.backwards))
            _add(inner, seeds, copies[each.inside], item)
    items = [(i, each) for i, each in enumerate(form.items, start=form.first) if ctx.wants(i)]
    captured = [(i, value) for i, value in enumerate(ctx.captured, start=len(ctx.inputs)) if ctx.wants(i)]
    sources = [*(state.inside for state in live), *(each.inside for _, each in items)]
    wrt = [*(copies[value] for value in sources), *(value for _, value in captured)]
    gradients = iter(pull_back(inner, seeds, wrt))
    for state, cotangent in zip(live, after):
        gradient = next(gradients)
        before = inner.full_like(cotangent, 0.0) if gradient is None else gradient
        last = ctx.cotangents[ctx.outputs.index(state.result)]
        start = ctx.op.full_like(state.result, 0.0) if last is None else last
        back.carry(Carried(cotangent, start, before), state.index if ctx.wants(state.index) else None)
    for i, each in items:
        gradient = next(gradients)
        if gradient is not None:
            back.stacked.append(Stacked(gradient, each.axis, not each.backwards))
            back.stacked_of.append(i)
    # Summed up from iteration to iteration. One product after the loop, of factors that the loop stacks, takes 0.62 to
    # 0.65 of the time at batch 1, but 0.93 to 1.1 at batch 32 (RNN and LSTM, width 128, 50 steps, ONNX Runtime 1.31.1),
    # and the stacks grow with the batch and the steps.
    for i, value in captured:
        gradient = next(gradients)
        if gradient is not None:
            total = body_value(inner, f"{value.name}/sum", value)
            back.carry(Carried(total, ctx.op.full_like(value, 0.0), inner.Add(total, gradient)), i)
    if all(index is None for index in back.carried_of) and not back.stacked:
        return None
    read_kept(ctx, form, back, {state.inside for state in live})
    return back


def _live_states(ctx: RuleContext, form: Form) -> tuple[list[State], set[ir.Value]]:
    """The states that depend on a wanted value in some iteration, and that a target depends on; the values of the body
    that depend on a wanted one. Raises MissingRuleError for such a state that is a sequence."""
    (flow,) = flows(ctx.node)
    read = (*ctx.inputs, *ctx.captured)
    active = active_inside(flow, {value for i, value in enumerate(read) if value is not None and ctx.wants(i)})
    given = {value for value, cotangent in zip(ctx.outputs, ctx.cotangents) if cotangent is not None}
    needed = needed_inside(flow, given)
    live = [
        state
        for state in form.states
        if state.inside in active and (state.inside in needed or state.result in given) and is_float(state.inside)
    ]
    for state in live:
        if not isinstance(state.inside.type, ir.TensorType):
            ctx.refuse(
                f"the carried value {state.inside.name!r}",
                "sequences have no gradient; carry a tensor with an axis for them",
            )
    return live, active


def _stacked_cotangents(ctx: RuleContext, form: Form) -> list[tuple[Series, ir.Value]]:
    given = dict(zip(ctx.outputs, ctx.cotangents))
    found = ((each, given.get(each.outside)) for each in form.stacked)
    return [(each, cotangent) for each, cotangent in found if cotangent is not None and is_float(each.inside)]


def _add(op: Builder, seeds: dict[ir.Value, ir.Value], target: ir.Value, seed: ir.Value) -> None:
    seeds[target] = op.Add(seeds[target], seed) if target in seeds else seed


def _name_sizes(inner: Builder, value: ir.Value) -> None:
    """Unknown sizes get names, so that the gradient's sizes are known to be the value's."""
    if value.shape is not None:
        value.shape = ir.Shape([inner.unique("size") if d is None else d for d in dims(value)])
