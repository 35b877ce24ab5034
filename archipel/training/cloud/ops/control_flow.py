"""If, Loop and Scan: Python, as PyTorch means control flow.

A body is a module of its own, and the loop around it is a Python loop; gradients reach states, sequences and captured
values as in any PyTorch code.

torch.compile unrolls a loop whose number of iterations the graph fixes, up to `MOST_UNROLLED`: with 16 of a small
recurrent cell a step takes 0.8 of the time of an uncompiled one, and compiling 3 s; with 64 it takes 0.3 to 0.6, and 10
s. Another loop is one break in the compiled graph and runs as it does without torch.compile: compiled by itself, its
body took three times as long, as each iteration asks anew whether the compiled code fits. An If whose condition a
tensor holds is a break, too, and its branches are compiled. PyTorch's own operators for loops are not used: with
PyTorch 2.13 a compiled `while_loop` over 100 steps of a small recurrent cell took twelve times as long as the Python
loop, forwards and backwards, and `scan` was refused because a result of its body shares memory with another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch

from archipel.errors import TrainingError
from archipel.graph.shapes import constant_array, dims, dtype_of
from archipel.graph.walk import trace_back
from archipel.training.cloud.ops.bodies import NUMBER
from archipel.training.cloud.ops.compiling import uncompiled
from archipel.training.cloud.ops.context import NodeContext
from archipel.training.cloud.ops.lanes import find_map
from archipel.training.cloud.ops.table import lowering
from archipel.training.cloud.ops.types import torch_dtype

Module = Callable[..., tuple[torch.Tensor, ...]]

MOST_UNROLLED = 64


@lowering("If")
def branch(ctx: NodeContext) -> tuple[torch.Tensor, ...]:
    fixed = ctx.constant(0)
    if fixed is not None:
        body = ctx.body("then_branch" if bool(fixed) else "else_branch")
        found = ctx.call(_call, body.module, body.captured)
    else:
        then, otherwise = ctx.body("then_branch"), ctx.body("else_branch")
        condition = ctx.sizes(0)[0] if ctx.is_size(0) else ctx.tensor(0)
        found = ctx.call(_branch, condition, then.module, then.captured, otherwise.module, otherwise.captured)
    return tuple(found[i] for i in range(len(ctx.node.outputs)))


def _call(module: Module, captured: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    return module(*captured)


def _branch(
    condition: Any, then: Module, captured: Sequence[Any], otherwise: Module, captured_otherwise: Sequence[Any]
) -> tuple[torch.Tensor, ...]:
    if isinstance(condition, torch.Tensor) and _differs_by_lane(condition):
        return _both(condition, then(*captured), otherwise(*captured_otherwise))
    return then(*captured) if bool(condition) else otherwise(*captured_otherwise)


def _differs_by_lane(tensor: torch.Tensor) -> bool:
    functorch = torch._C._functorch  # has no public name
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def _both(
    condition: torch.Tensor, chosen: tuple[torch.Tensor, ...], others: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """Under `torch.func.vmap`, with a condition of each lane: both branches run, which change nothing around them."""
    results = []
    for one, other in zip(chosen, others, strict=True):
        if one.shape != other.shape:
            raise TrainingError(
                "If: under torch.func.vmap its condition differs from lane to lane, and so does the shape of a result: "
                f"{list(one.shape)} or {list(other.shape)}; give both branches results of one shape"
            )
        results.append(torch.where(condition.reshape([1] * one.ndim), one, other))
    return tuple(results)


@lowering("Loop")
def loop(ctx: NodeContext) -> tuple[torch.Tensor, ...]:
    graph = ctx.node.attributes["body"].as_graph()
    number, on = graph.inputs[:2]
    given: dict[ir.Value, Any] = {number: NUMBER}
    goes_on = trace_back(graph.outputs[0], {"Identity"})
    always = goes_on is on or _is_true(goes_on)
    if always:
        given[on] = torch.tensor(True)
    body = ctx.body("body", given)
    states = [ctx.tensor(index) for index in range(2, len(ctx.node.inputs))]
    limit = ctx.sizes(0)[0] if ctx.has(0) else None
    condition = None
    if ctx.has(1):
        fixed = ctx.constant(1)
        condition = ctx.tensor(1) if fixed is None else bool(fixed)
    empty = [_empty(value) for value in graph.outputs[1 + len(states) :]]
    once = isinstance(limit, int) and limit <= MOST_UNROLLED and always
    found = ctx.call(
        _loop if once else uncompiled(_loop),
        body.module,
        limit,
        condition,
        always,
        states,
        body.sequences,
        body.captured,
        empty,
        ctx.device,
    )
    return tuple(found[i] for i in range(len(ctx.node.outputs)))


def _loop(
    module: Module,
    limit: int | None,
    condition: Any,
    always: bool,
    states: Sequence[torch.Tensor],
    sequences: Sequence[tuple[torch.Tensor, int]],
    captured: Sequence[Any],
    empty: Sequence[Empty],
    device: torch.device,
) -> list[torch.Tensor]:
    """The states in the end, and what the iterations stacked. `always`: the body never ends the loop."""
    # Views, whose gradients are put together once. Reading one item after the other, each gradient would have the size
    # of the whole.
    items = [tensor.unbind(axis) for tensor, axis in sequences]
    stacked: list[list[torch.Tensor]] = [[] for _ in empty]
    goes_on = condition is None or bool(condition)
    number = 0
    while goes_on and (limit is None or number < limit):
        inputs = [number] if always else [number, condition]
        if not always and not isinstance(condition, torch.Tensor):
            inputs[1] = torch.ones((), dtype=torch.bool, device=device)
        condition, *found = module(*inputs, *states, *(each[number] for each in items), *captured)
        states = found[: len(states)]
        for column, value in zip(stacked, found[len(states) :]):
            column.append(value)
        goes_on = always or bool(condition)
        number += 1
    return [*states, *(_stack(column, 0, each, device) for column, each in zip(stacked, empty))]


@lowering("Scan")
def scan(ctx: NodeContext) -> tuple[torch.Tensor, ...]:
    count = ctx.integer("num_scan_inputs", 1)
    states = ctx.tensors()[: len(ctx.node.inputs) - count]
    results = len(ctx.node.outputs) - len(states)
    body = ctx.body("body")
    sequences = [
        (ctx.tensor(len(states) + i), axis, bool(backwards))
        for i, (axis, backwards) in enumerate(_ways(ctx, "scan_input", count))
    ]
    graph = ctx.node.attributes["body"].as_graph()
    ends = [
        (axis, bool(backwards), _empty(value))
        for value, (axis, backwards) in zip(graph.outputs[len(states) :], _ways(ctx, "scan_output", results))
    ]
    if not states and not any(backwards for _, _, backwards in sequences):
        axes = [axis for axis, _, _ in ends]
        mapped = find_map(graph, [axis for _, axis, _ in sequences], axes) if not any(e[1] for e in ends) else None
        if mapped is not None:
            found = ctx.call(mapped, body.module, [(x, axis) for x, axis, _ in sequences], body.captured, axes)
            return tuple(found[i] for i in range(len(ctx.node.outputs)))
    length = ctx.dims(len(states))[_ways(ctx, "scan_input", count)[0][0]]
    run = _scan if isinstance(length, int) and length <= MOST_UNROLLED else uncompiled(_scan)
    found = ctx.call(run, body.module, states, sequences, body.captured, ends, ctx.device)
    return tuple(found[i] for i in range(len(ctx.node.outputs)))


def _ways(ctx: NodeContext, kind: str, count: int) -> list[tuple[int, int]]:
    """Axis and direction of each sequence."""
    axes, directions = (ctx.integers(f"{kind}_{what}", [0] * count) for what in ("axes", "directions"))
    return list(zip(axes, directions))


def _scan(
    module: Module,
    states: Sequence[torch.Tensor],
    sequences: Sequence[tuple[torch.Tensor, int, bool]],
    captured: Sequence[Any],
    ends: Sequence[tuple[int, bool, Empty]],
    device: torch.device,
) -> list[torch.Tensor]:
    """The states in the end, and what the iterations stacked."""
    items = [x.unbind(axis)[:: -1 if backwards else 1] for x, axis, backwards in sequences]
    stacked: list[list[torch.Tensor]] = [[] for _ in ends]
    for each in zip(*items, strict=True):
        found = module(*states, *each, *captured)
        states = found[: len(states)]
        for column, value in zip(stacked, found[len(states) :]):
            column.append(value)
    return [
        *states,
        *(
            _stack(column[:: -1 if backwards else 1], axis, empty, device)
            for column, (axis, backwards, empty) in zip(stacked, ends)
        ),
    ]


Empty = tuple[tuple[int, ...], torch.dtype]


def _empty(value: ir.Value) -> Empty:
    """Shape and type of one item, for a loop without iterations: sizes that are not declared are 0."""
    shape = () if value.shape is None else dims(value)
    return tuple(size if isinstance(size, int) else 0 for size in shape), torch_dtype(dtype_of(value))


def _stack(column: Sequence[torch.Tensor], axis: int, empty: Empty, device: torch.device) -> torch.Tensor:
    if column:
        return torch.stack(list(column), axis)
    shape, dtype = list(empty[0]), empty[1]
    shape.insert(axis + len(shape) + 1 if axis < 0 else axis, 0)
    return torch.zeros(shape, dtype=dtype, device=device)


def _is_true(value: ir.Value) -> bool:
    content = constant_array(value)
    return content is not None and bool(content.all())
