"""What the way back of a loop reads of the way there: stacked values, and states that it reads one iteration late."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from archipel.autodiff.context import RuleContext
from archipel.autodiff.recompute import is_compared
from archipel.autodiff.rules.control_flow.form import Form, Series, State, WayBack
from archipel.autodiff.rules.control_flow.kept import read_shapes_elsewhere, values_to_keep
from archipel.graph.bodies import copy_body, remove_unneeded, widen
from archipel.graph.body_shapes import infer_graph
from archipel.graph.build import Builder
from archipel.graph.control import Carried, Item, body_value
from archipel.graph.shapes import dims, dtype_of, may_be_equal, with_axis
from archipel.graph.walk import captured_values


def read_kept(ctx: RuleContext, form: Form, back: WayBack, live: Collection[ir.Value]) -> None:
    """Have the forward loop stack what the body of `back` needs of it, and that body read it.

    Raises MissingRuleError for a state that is stacked, or in `live`, which are those whose cotangents the way back
    carries, if it is certain to have another shape in the next iteration.

    What is stacked is the states before each iteration and what is expensive to compute again. The states after an
    iteration are those before the next one, which the way back comes from: it carries them on.
    """
    graph, copies = back.op.graph, back.copies
    remove_unneeded(graph, back.results)
    read_shapes_elsewhere(copies, graph, [*back.inputs, *(copies[v.inside] for v in form.items), *ctx.captured])
    remove_unneeded(graph, back.results)
    ends = _ends(form, back)
    stacked = {value for each in form.stacked for value in (each.inside, _source(each.inside)) if value is not None}
    free = {value for value in (*ends, *stacked) if not is_compared(value)}
    for value in values_to_keep(ctx, copies, back.results, lambda v: _has_one_shape(ctx, form, v), free):
        item = body_value(back.op, f"{value.name}/kept", copies[value])
        if value in ends:
            back.carry(Carried(item, ends[value].result, copies[ends[value].inside]))
        else:
            back.items.append(_stacked_item(ctx, form, value, item))
        copies[value].replace_all_uses_with(item)
    remove_unneeded(graph, back.results)
    sequences = {each.inside: each for each in form.items}
    results = set(back.results)
    for value in form.body.inputs:
        copy = copies[value]
        is_read = bool(copy.uses()) or copy in results
        if value in live or (is_read and value not in sequences):
            _require_one_shape(ctx, form, value)
        if is_read and value in sequences:
            each = sequences[value]
            back.items.append(Item(copy, each.outside, each.axis, not each.backwards))
        elif is_read:
            back.items.append(_stacked_item(ctx, form, value, copy))


def read_number(ctx: RuleContext, form: Form, back: WayBack) -> None:
    """Read the numbers of a Loop's iterations, where the way back needs nothing but how many there were."""
    number = form.body.inputs[0]
    item = body_value(back.op, f"{number.name}/kept", number)
    back.items.append(_stacked_item(ctx, form, number, item))


def _ends(form: Form, back: WayBack) -> dict[ir.Value, State]:
    """The values that are a state's next one, of the states that the way back reads in any case."""
    read = set(back.results)
    found: dict[ir.Value, State] = {}
    for state in form.states:
        copy = back.copies[state.inside]
        if copy.uses() or copy in read:
            found[state.following] = state
            source = _source(state.following)
            if source is not None:
                found[source] = state
    return found


def _stacked_item(ctx: RuleContext, form: Form, value: ir.Value, item: ir.Value) -> Item:
    """Reads into `item` the value of each iteration of the forward loop, which stacks it."""
    for each in form.stacked:
        if value is each.inside or value is _source(each.inside):
            return Item(item, each.outside, each.axis, not each.backwards)
    inside = value
    if value.producer() is None or value.is_graph_output():
        inside = Builder(form.body, outer=ctx.op).Identity(value)
        inside.type, inside.shape = value.type, value.shape
    result = widen(ctx.op, ctx.node, [(form.body, inside)])
    result.dtype, result.shape = dtype_of(value), with_axis(value, 0, form.length)
    form.stacked.append(Series(inside, result, 0, False))
    return Item(item, result, backwards=True)


def _source(value: ir.Value) -> ir.Value | None:
    node = value.producer()
    return node.inputs[0] if node is not None and node.op_type == "Identity" else None


def _has_one_shape(ctx: RuleContext, form: Form, value: ir.Value) -> bool:
    """Whether the value certainly has the same shape in every iteration, so that it can be stacked."""
    if value.shape is None:
        return False
    outside = [*(v for v in ctx.inputs if v is not None), *captured_values(form.body)]
    names = {size for v in outside if v.shape is not None for size in dims(v) if isinstance(size, str)}
    return all(isinstance(size, int) or size in names for size in dims(value))


def _require_one_shape(ctx: RuleContext, form: Form, value: ir.Value) -> None:
    """Refuse a state that is certain to have another shape after the first iteration."""
    state = next((s for s in form.states if s.inside is value), None)
    if state is None or (value.shape is not None and all(isinstance(size, int) for size in dims(value))):
        return
    first, copies = copy_body(ctx.op, form.body, f"{form.body.name}/first")
    for copy in copies.values():
        copy.shape = None
    for each in form.states:
        copies[each.inside].shape = ctx.input(each.index).shape
    for series in form.items:
        copies[series.inside].shape = series.inside.shape
    infer_graph(first.graph)
    before, after = copies[value], copies[state.following]
    if before.shape is not None and after.shape is not None and not may_be_equal(dims(before), dims(after)):
        ctx.refuse(
            f"the carried value {value.name!r}",
            f"it has the shape {list(dims(before))} before the first iteration and {list(dims(after))} after it, and "
            "the way back needs those of all iterations in one tensor; give it the largest shape from the start and "
            "mask what is not used",
        )
    remove_unneeded(first.graph, [])  # what it captures would count as read
