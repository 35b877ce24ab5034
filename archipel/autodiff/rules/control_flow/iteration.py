"""What Scan and Loop share: the gradient of one iteration, around which each rule puts its loop.

The way there keeps the states before each iteration, stacked; the way back goes through them from the last to the
first, with the cotangents of the states and the sums for captured values as its states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from archipel.autodiff.activity import active_inside, needed_inside
from archipel.autodiff.context import RuleContext
from archipel.autodiff.reverse import pull_back
from archipel.autodiff.rules.control_flow.kept import read_shapes_elsewhere, show_masks, values_to_keep
from archipel.graph.bodies import copy_body, remove_unneeded, widen
from archipel.graph.body_shapes import infer_graph
from archipel.graph.build import Builder
from archipel.graph.control import Carried, Item, Stacked, body_value
from archipel.graph.flow import flows
from archipel.graph.shapes import Dim, dims, dtype_of, is_float, may_be_equal, with_axis
from archipel.graph.walk import captured_values


@dataclass
class Series:
    """A sequence of the loop: the body's input or output, and how the node reads or stacks it."""

    inside: ir.Value
    outside: ir.Value
    axis: int
    backwards: bool


@dataclass
class Form:
    """A loop: `states` are (input of the body, its output, index of the node's input, result of the node); `items` and
    `stacked` its sequences, and `first` the index of the node's first sequence among its inputs. `length`: of
    the stacked values."""

    body: ir.Graph
    states: list[tuple[ir.Value, ir.Value, int, ir.Value]]
    items: list[Series]
    first: int
    stacked: list[Series]
    length: Dim


@dataclass
class WayBack:
    """The parts of the loop of the gradient, for `emit_scan`, and whose gradients its results are: indices among the
    node's inputs and captured values. `op` has the body."""

    op: Builder
    carried: list[Carried]
    carried_of: list[int | None]
    items: list[Item]
    stacked: list[Stacked]
    stacked_of: list[int]


def way_back(ctx: RuleContext, form: Form) -> WayBack | None:
    """Emit the body of the gradient; None if no gradient arrives at any input or captured value."""
    live, active = _live_states(ctx, form)
    for inside, *_ in live:
        if not isinstance(inside.type, ir.TensorType):
            ctx.refuse(
                f"the carried value {inside.name!r}", "sequences have no gradient; carry a tensor with an axis for them"
            )
    show_masks(ctx.op, form.body)
    inner, copies = copy_body(ctx.op, form.body, f"{form.body.name}/vjp")
    for value in form.body.inputs:
        _name_sizes(inner, copies[value])
    # Cotangents of the states after the iteration, and of what it stacks.
    seeds: dict[ir.Value, ir.Value] = {}
    items: list[Item] = []
    after: list[ir.Value] = []
    for inside, following, _, _ in live:
        after.append(body_value(inner, f"{inside.name}/cotangent", copies[inside]))
        _add(inner, seeds, copies[following], after[-1])
    for each, cotangent in _stacked_cotangents(ctx, form):
        if each.inside in active:
            item = body_value(inner, f"{each.inside.name}/cotangent", cotangent, skip=each.axis)
            items.append(Item(item, cotangent, each.axis, not each.backwards))
            _add(inner, seeds, copies[each.inside], item)
    captured = [i for i in range(len(ctx.inputs), len(ctx.inputs) + len(ctx.captured)) if ctx.wants(i)]
    wanted = [i for i, each in enumerate(form.items) if ctx.wants(form.first + i)]
    gradients = iter(
        pull_back(
            inner,
            seeds,
            [
                *(copies[inside] for inside, *_ in live),
                *(copies[form.items[i].inside] for i in wanted),
                *(ctx.captured[i - len(ctx.inputs)] for i in captured),
            ],
        )
    )
    carried: list[Carried] = []
    carried_of: list[int | None] = []
    for (_, _, index, result), cotangent in zip(live, after):
        gradient = next(gradients)
        before = inner.full_like(cotangent, 0.0) if gradient is None else gradient
        given = ctx.cotangents[ctx.outputs.index(result)]
        start = ctx.op.full_like(result, 0.0) if given is None else given
        carried.append(Carried(cotangent, start, before))
        carried_of.append(index if ctx.wants(index) else None)
    stacked: list[Stacked] = []
    stacked_of: list[int] = []
    for i in wanted:
        gradient, sequence = next(gradients), form.items[i]
        if gradient is not None:
            stacked.append(Stacked(gradient, sequence.axis, not sequence.backwards))
            stacked_of.append(form.first + i)
    for i in captured:
        gradient, value = next(gradients), ctx.captured[i - len(ctx.inputs)]
        if gradient is not None:
            total = body_value(inner, f"{value.name}/sum", value)
            carried.append(Carried(total, ctx.op.full_like(value, 0.0), inner.Add(total, gradient)))
            carried_of.append(i)
    if all(index is None for index in carried_of) and not stacked:
        return None
    results = [*(each.following for each in carried), *(each.inside for each in stacked)]
    _read_kept(ctx, form, inner, copies, carried, items, results)
    return WayBack(inner, carried, carried_of, items, stacked, stacked_of)


def _live_states(ctx: RuleContext, form: Form) -> tuple[list[tuple[ir.Value, ir.Value, int, ir.Value]], set[ir.Value]]:
    """The states that depend on a wanted value in some iteration, and that a target depends on; the values of the body
    that depend on a wanted one."""
    (flow,) = flows(ctx.node)
    read = (*ctx.inputs, *ctx.captured)
    active = active_inside(flow, {value for i, value in enumerate(read) if value is not None and ctx.wants(i)})
    given = {value for value, cotangent in zip(ctx.outputs, ctx.cotangents) if cotangent is not None}
    needed = needed_inside(flow, given)
    return [s for s in form.states if s[0] in active and (s[0] in needed or s[3] in given) and is_float(s[0])], active


def _stacked_cotangents(ctx: RuleContext, form: Form) -> list[tuple[Series, ir.Value]]:
    given = dict(zip(ctx.outputs, ctx.cotangents))
    found = ((each, given.get(each.outside)) for each in form.stacked)
    return [(each, cotangent) for each, cotangent in found if cotangent is not None and is_float(each.inside)]


def _add(op: Builder, seeds: dict[ir.Value, ir.Value], target: ir.Value, seed: ir.Value) -> None:
    seeds[target] = op.Add(seeds[target], seed) if target in seeds else seed


def _read_kept(
    ctx: RuleContext,
    form: Form,
    inner: Builder,
    copies: dict[ir.Value, ir.Value],
    carried: Sequence[Carried],
    items: list[Item],
    results: Sequence[ir.Value],
) -> None:
    """Have the forward loop stack what the copy needs of it, and the copy read that: the states before each iteration,
    and what is expensive to compute again."""
    remove_unneeded(inner.graph, results)
    free = [
        *(each.inside for each in carried),
        *(each.inside for each in items),
        *(copies[v.inside] for v in form.items),
    ]
    read_shapes_elsewhere(copies, inner.graph, [*free, *ctx.captured])
    remove_unneeded(inner.graph, results)
    for value in values_to_keep(ctx, copies, results, lambda value: _has_one_shape(ctx, form, value)):
        item = body_value(inner, f"{value.name}/kept", copies[value])
        items.append(_stacked_item(ctx, form, value, item))
        copies[value].replace_all_uses_with(item)
    remove_unneeded(inner.graph, results)
    sequences = {each.inside: each for each in form.items}
    for value in form.body.inputs:
        copy = copies[value]
        if not copy.uses() and copy not in results:
            continue
        if value in sequences:
            each = sequences[value]
            items.append(Item(copy, each.outside, each.axis, not each.backwards))
        else:
            _require_one_shape(ctx, form, value)
            items.append(_stacked_item(ctx, form, value, copy))


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
    state = next((s for s in form.states if s[0] is value), None)
    if state is None or (value.shape is not None and all(isinstance(size, int) for size in dims(value))):
        return
    first, copies = copy_body(ctx.op, form.body, f"{form.body.name}/first")
    for copy in copies.values():
        copy.shape = None
    for inside, _, index, _ in form.states:
        copies[inside].shape = ctx.input(index).shape
    for each in form.items:
        copies[each.inside].shape = each.inside.shape
    infer_graph(first.graph)
    before, after = copies[value], copies[state[1]]
    if before.shape is not None and after.shape is not None and not may_be_equal(dims(before), dims(after)):
        ctx.refuse(
            f"the carried value {value.name!r}",
            f"it has the shape {list(dims(before))} before the first iteration and {list(dims(after))} after it, and "
            "the way back needs those of all iterations in one tensor; give it the largest shape from the start and "
            "mask what is not used",
        )
    remove_unneeded(first.graph, [])  # what it captures would count as read


def _name_sizes(inner: Builder, value: ir.Value) -> None:
    """Unknown sizes get names, so that the gradient's sizes are known to be the value's."""
    if value.shape is not None:
        value.shape = ir.Shape([inner.unique("size") if d is None else d for d in dims(value)])


def keep_number(ctx: RuleContext, form: Form, back: WayBack) -> None:
    """Have a Loop stack the numbers of its iterations, where the way back needs nothing but how many there were."""
    number = form.body.inputs[0]
    item = body_value(back.op, f"{number.name}/kept", number)
    back.items.append(_stacked_item(ctx, form, number, item))
