"""If, Loop and Scan: their bodies get lanes, captured values included, and nothing is unrolled.

Lanes that decide differently go the same way together. An If whose condition differs from lane to lane computes both
branches and picks. A Loop whose lanes stop at different times runs until the last has stopped; lanes that have stopped
keep their values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import onnx_ir as ir

from archipel.autodiff.activity import reads_content
from archipel.autodiff.batching.context import LaneContext
from archipel.autodiff.batching.sweep import Sweep
from archipel.autodiff.batching.table import BatchedResults, Shared, batch_rule
from archipel.autodiff.rules.control_flow.kept import UNREAD
from archipel.graph.build import Builder
from archipel.graph.shapes import dims, dtype_of, may_be_equal
from archipel.graph.walk import descendants

_BOOL, _INT32 = int(ir.DataType.BOOL), int(ir.DataType.INT32)
# ONNX Runtime's Where takes these; others pass through a wider type.
_SELECTED = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.UINT8)


@batch_rule("If")
def if_(ctx: LaneContext) -> BatchedResults:
    branches = [ctx.node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
    if ctx.batched(0):
        return _both(ctx, branches)
    sweeps = [_enter(ctx, branch) for branch in branches]
    pairs = list(zip(sweeps, branches))
    lanes = [any(b.outputs[i] in s.batched for s, b in pairs) for i in range(len(ctx.node.outputs))]
    for sweep, branch in pairs:
        for value, batched in zip(branch.outputs, lanes):
            _give(sweep, value, batched)
    graphs = [sweep.op.graph for sweep in sweeps]
    found = ctx.op.emit("If", ctx.value(0), then_branch=graphs[0], else_branch=graphs[1], outputs=len(ctx.node.outputs))
    return _results(ctx, found, lanes)


def _both(ctx: LaneContext, branches: Sequence[ir.Graph]) -> BatchedResults:
    """Compute both branches in the graph around the If, and pick from them for each lane by its condition."""
    sweeps = []
    for branch in branches:
        sweep = ctx.sweep.inside(ctx.op)
        sweep.enter(branch)
        sweep.run(branch)
        sweeps.append(sweep)
    condition = _flat(ctx, 0)
    results = []
    for pair in zip(*(branch.outputs for branch in branches)):
        found = [
            sweep.value(value) if value in sweep.batched else sweep.repeat(sweep.value(value))
            for sweep, value in zip(sweeps, pair)
            if not _is_unread(value)
        ]
        if len(found) == 2:
            if not may_be_equal(dims(pair[0]), dims(pair[1])):
                ctx.refuse(
                    "its condition differs from lane to lane, and its branches give results of different shapes; give "
                    "them one shape"
                )
            found = [select(ctx.op, condition, *found)]
        results += found
    return results


def _is_unread(value: ir.Value) -> bool:
    node = value.producer()
    return node is not None and UNREAD in node.metadata_props


@batch_rule("Scan")
def scan(ctx: LaneContext) -> BatchedResults:
    body = ctx.node.attributes["body"].as_graph()
    sequences: int = ctx.attribute("num_scan_inputs", 0)
    states = len(ctx.node.inputs) - sequences
    moving = [ctx.batched(i) for i in range(states)]
    items = [ctx.batched(states + i) for i in range(sequences)]
    _settle(ctx, body, moving, body.inputs[:states], body.outputs[:states], _chosen(body.inputs[states:], items))
    inner = _enter(ctx, body, [*_chosen(body.inputs[:states], moving), *_chosen(body.inputs[states:], items)])
    stacked = [value in inner.batched for value in body.outputs[states:]]
    for value, batched in zip(body.outputs, [*moving, *stacked]):
        _give(inner, value, batched)
    input_axes = ctx.attribute("scan_input_axes", [0] * sequences)
    output_axes = ctx.attribute("scan_output_axes", [0] * len(stacked))
    # The items' axis goes first: along another one ONNX Runtime's Scan divides by zero where a tensor is empty.
    read = [
        _items_first(ctx, i, a) if b else ctx.value(i) for i, (a, b) in enumerate(zip(input_axes, items), start=states)
    ]
    found = ctx.same(
        *(ctx.spread(i) if moving[i] else ctx.value(i) for i in range(states)),
        *read,
        body=inner.op.graph,
        scan_input_axes=[0 if b else a for a, b in zip(input_axes, items)],
        scan_output_axes=[0 if b else a for a, b in zip(output_axes, stacked)] or None,
    )
    for i, (a, b) in enumerate(zip(output_axes, stacked), start=states):
        if b:
            found[i].dtype, rank = dtype_of(body.outputs[i]), len(dims(body.outputs[i])) + 1
            found[i].shape = ir.Shape([None] * (rank + 1))
            order = [1, *range(2, rank + 1)]
            order.insert(a % rank + 1, 0)
            found[i] = ctx.op.Transpose(found[i], perm=order)
    return _results(ctx, found, [*moving, *stacked])


def _items_first(ctx: LaneContext, index: int, axis: int) -> ir.Value:
    """A batched input [lanes, ...], whose items lie along `axis` in a lane, as [items, lanes, ...]."""
    axis = axis % ctx.rank(index) + 1
    others = (i for i in range(ctx.rank(index) + 1) if i != axis)
    return ctx.op.Transpose(ctx.value(index), perm=[axis, *others])


@batch_rule("Loop")
def loop(ctx: LaneContext) -> BatchedResults:
    body = ctx.node.attributes["body"].as_graph()
    states = len(ctx.node.inputs) - 2
    moving = [ctx.batched(2 + i) for i in range(states)]
    parts = body.inputs[2 : 2 + states], body.outputs[1 : 1 + states]
    reached = _settle(ctx, body, moving, *parts)
    if ctx.batched(0, 1) or body.outputs[0] in reached:
        return _until_the_last(ctx, body)
    inner = _enter(ctx, body, _chosen(parts[0], moving))
    stacked = [value in inner.batched for value in body.outputs[1 + states :]]
    for value, batched in zip(body.outputs, [False, *moving, *stacked]):
        _give(inner, value, batched)
    carried = [ctx.spread(2 + i) if moving[i] else ctx.value(2 + i) for i in range(states)]
    start = [ctx.value(i) if ctx.has(i) else None for i in (0, 1)]
    found = ctx.same(*start, *carried, body=inner.op.graph)
    for i, batched in enumerate(stacked, start=states):
        if batched:
            found[i] = _lanes_first(ctx, found[i], body.outputs[1 + i])
    return _results(ctx, found, [*moving, *stacked])


def _lanes_first(ctx: LaneContext, stacked: ir.Value, each: ir.Value) -> ir.Value:
    """What a Loop stacks is [iterations, lanes, ...]; here the lanes come first."""
    op, rank = ctx.op, len(dims(each)) + 2
    stacked.dtype, stacked.shape = dtype_of(each), ir.Shape([None] * rank)
    # Without an iteration a Loop does not know how many lanes there are.
    shape = [op.Shape(stacked, start=0, end=1), ctx.count, *([op.Shape(stacked, start=2)] if rank > 2 else [])]
    stacked = op.Reshape(stacked, op.Concat(*shape, axis=0), allowzero=1)
    return op.Transpose(stacked, perm=[1, 0, *range(2, rank)])


def _until_the_last(ctx: LaneContext, body: ir.Graph) -> BatchedResults:
    """A Loop whose lanes stop at different times. Each carries whether it is active and the number of its iteration."""
    op, states = ctx.op, len(ctx.node.inputs) - 2
    if any(ctx.used(i) for i in range(states, len(ctx.node.outputs))):
        ctx.refuse(
            "its lanes stop at different times, so what it stacks has another length in each; for a gradient, take the "
            "gradient of the vmap, not the vmap of the gradient; else carry a tensor of fixed size and write into it, "
            "or leave what decides when it stops out of over"
        )
    limit = _flat(ctx, 0) if ctx.has(0) else None
    active = op.Expand(np.array([True]), ctx.count) if not ctx.has(1) else _flat(ctx, 1)
    if limit is not None:
        active = op.And(active, op.Greater(limit, np.array(0)))
    number = op.Expand(np.array([0]), ctx.count)
    carried = [active, number, *(ctx.spread(2 + i) for i in range(states))]

    inner = ctx.sweep.inside(op.body(body.name or "body"))
    new = inner.op
    new.input(new.unique("iteration"), ir.DataType.INT64, [])
    new.input(new.unique("go_on"), ir.DataType.BOOL, [])
    size = ctx.sweep.size
    active_now = new.input(new.unique("active"), ir.DataType.BOOL, [size])
    number_now = new.input(new.unique("number"), ir.DataType.INT64, [size])
    inner.batched[body.inputs[0]] = number_now
    inner.plain[body.inputs[1]] = new.constant(np.array(True))
    before = []
    for i, old in enumerate(body.inputs[2:]):
        sizes = [new.unique("size") if d is None else d for d in dims(old)]
        before.append(new.input(new.unique(old.name or "state"), dtype_of(ctx.input(2 + i)), [size, *sizes]))
        inner.batched[old] = before[-1]
    inner.enter_initializers(body)
    inner.run(body)
    after = [inner.value(v) if v in inner.batched else inner.repeat(inner.value(v)) for v in body.outputs[: 1 + states]]
    following = new.Add(number_now, np.array(1))
    go_on = new.And(active_now, new.Reshape(after[0], [-1]))
    if limit is not None:
        go_on = new.And(go_on, new.Less(following, limit))
    kept = [select(new, active_now, value, old) for value, old in zip(after[1:], before)]
    for value in (_any(new, go_on), go_on, select(new, go_on, following, number_now), *kept):
        new.name_output(value, new.unique("out"))
    longest = None if limit is None else op.ReduceMax(limit, keepdims=0)
    found = op.emit("Loop", longest, _any(op, active), *carried, body=new.graph, outputs=len(carried))
    return [*_results(ctx, found[2:], [True] * states), *[None] * (len(ctx.node.outputs) - states)]


def select(op: Builder, mask: ir.Value, yes: ir.Value, no: ir.Value) -> ir.Value:
    """Pick `yes` in the lanes where `mask` ([lanes], bool) holds, `no` in the others."""
    axes = list(range(1, len(dims(yes))))
    mask = op.Unsqueeze(mask, axes) if axes else mask
    dtype = dtype_of(yes)
    if dtype in _SELECTED:
        return op.Where(mask, yes, no)
    wide = ir.DataType.FLOAT if dtype.is_floating_point() else ir.DataType.INT64
    if dtype == ir.DataType.BOOL:
        wide = ir.DataType.UINT8
    chosen = op.Where(mask, *(op.Cast(value, to=int(wide)) for value in (yes, no)))
    return op.Cast(chosen, to=int(dtype))


def _any(op: Builder, mask: ir.Value) -> ir.Value:
    return op.Cast(op.ReduceMax(op.Cast(mask, to=_INT32), keepdims=0), to=_BOOL)


def _flat(ctx: LaneContext, index: int) -> ir.Value:
    """An input with one element, [lanes]."""
    return ctx.reshape(ctx.spread(index), ctx.lanes)


def _enter(ctx: LaneContext, body: ir.Graph, over: Sequence[ir.Value] = ()) -> Sweep:
    inner = ctx.sweep.inside(ctx.op.body(body.name or "body"))
    inner.enter(body, over)
    inner.run(body)
    return inner


def _give(inner: Sweep, value: ir.Value, batched: bool) -> None:
    """Make a value of the original body an output of the new one."""
    new = inner.value(value)
    if batched and value not in inner.batched:
        new = inner.repeat(new)
    inner.op.name_output(new, inner.op.unique("out"))


def _chosen(values: Iterable[ir.Value], flags: Sequence[bool]) -> list[ir.Value]:
    return [value for value, flag in zip(values, flags) if flag]


def _settle(
    ctx: LaneContext,
    body: ir.Graph,
    moving: list[bool],
    inside: Sequence[ir.Value],
    outside: Sequence[ir.Value],
    items: Sequence[ir.Value] = (),
) -> set[ir.Value]:
    """Find out which carried values have lanes, in `moving`: one that is given lanes, or gets them in an iteration.

    Returns the body's values that depend on one that has, or on an item or captured value that has.
    """
    nodes = [node for node in body if reads_content(node)]
    while True:
        reached = descendants(nodes, [*ctx.sweep.batched, *items, *_chosen(inside, moving)])
        following = [flag or value in reached for flag, value in zip(moving, outside)]
        if following == moving:
            return reached
        moving[:] = following


def _results(ctx: LaneContext, found: Sequence[ir.Value], lanes: Sequence[bool]) -> list[ir.Value | Shared | None]:
    """`emit` infers nothing for nodes with bodies."""
    results: list[ir.Value | Shared | None] = []
    for old, value, batched in zip(ctx.node.outputs, found, lanes):
        value.dtype = dtype_of(old)
        value.shape = ctx.sweep.with_lanes(old) if batched else old.shape
        results.append(value if batched else Shared(value))
    return results
