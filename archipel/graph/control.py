"""Loops and branches whose bodies are written as Python functions, or put together from values of a body's graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from archipel.errors import GraphError
from archipel.graph.build import Builder
from archipel.graph.shapes import dims, dtype_of, with_axis

Body = Callable[[Builder, list[ir.Value], list[ir.Value]], tuple[Sequence[ir.Value], Sequence[ir.Value]]]
"""(builder of the body, carried values, one item of each sequence) -> (next carried values, values to stack)."""

Branch = Callable[[Builder], Sequence[ir.Value]]
"""Builder of the branch -> its results."""


@dataclass(frozen=True)
class Carried:
    """A state of a Scan: what the body reads (`inside`), with what the loop starts, and the body's next value."""

    inside: ir.Value
    initial: ir.Value
    following: ir.Value


@dataclass(frozen=True)
class Item:
    """A sequence that a Scan reads along `axis`, and what the body reads of it; `backwards`: from the last item on."""

    inside: ir.Value
    sequence: ir.Value
    axis: int = 0
    backwards: bool = False


@dataclass(frozen=True)
class Stacked:
    """A value of the body that a Scan stacks along a new `axis`; `backwards`: each new one in front of the others."""

    inside: ir.Value
    axis: int = 0
    backwards: bool = False


def scan(
    op: Builder,
    body: Body,
    carried: Sequence[ir.Value],
    sequences: Sequence[ir.Value],
    *,
    reverse: bool = False,
    name: str = "body",
) -> tuple[list[ir.Value], list[ir.Value]]:
    """Emit a Scan (ONNX Scan-21) over axis 0 of `sequences`; with `reverse` from the last item to the first.

    Returns the carried values after the last item, each in the shape and type it started with, and the values that the
    body emits, stacked along a new axis 0 (item i belongs to item i of the sequences in either direction). The body may
    read any value of the graph outside. Raises GraphError if a carried value changes its type or rank.
    """
    inner = op.body(name)
    states = [body_value(inner, f"{name}/carried", v) for v in carried]
    items = [body_value(inner, f"{name}/item", v, skip=0) for v in sequences]
    following, emitted = body(inner, states, items)
    if len(following) != len(carried):
        raise GraphError(f"scan {name!r}: {len(carried)} values are carried, the body returns {len(following)}")
    return emit_scan(
        op,
        inner,
        [Carried(*each) for each in zip(states, carried, following)],
        [Item(inside, sequence, backwards=reverse) for inside, sequence in zip(items, sequences)],
        # Also for outputs: stacked from the end, so that their items stay beside those they were made of.
        [Stacked(value, backwards=reverse) for value in emitted],
        name=name,
    )


def body_value(inner: Builder, name: str, like: ir.Value, skip: int | None = None) -> ir.Value:
    """A value that is to be an input of a body, of the type and shape of `like`, without the axis `skip`.

    Unknown sizes get names, so that equal ones are known to be equal.
    """
    shape = list(dims(like))
    if skip is not None:
        del shape[skip]
    named = [inner.unique("size") if d is None else d for d in shape]
    return ir.Value(name=inner.unique(name), type=ir.TensorType(dtype_of(like)), shape=ir.Shape(named))


def emit_scan(
    op: Builder,
    inner: Builder,
    carried: Sequence[Carried],
    items: Sequence[Item],
    stacked: Sequence[Stacked],
    *,
    name: str = "body",
) -> tuple[list[ir.Value], list[ir.Value]]:
    """Emit a Scan (ONNX Scan-21) with the graph of `inner` as its body, which has no inputs and outputs yet.

    Returns the carried values after the last item, and the stacked values. Raises GraphError if a carried value changes
    its type or rank, and without `items`: a Scan takes its number of iterations from them.
    """
    if not items:
        raise GraphError(f"scan {name!r}: at least one sequence is needed, whose length is the number of iterations")
    # Checked here, where the error can name the loop and the value.
    for state in carried:
        before, value = state.inside, state.following
        if value.dtype != before.dtype or len(dims(value)) != len(dims(before)):
            raise GraphError(
                f"scan {name!r}: carried {before.name!r} is {before.dtype}{list(dims(before))}, "
                f"the body returns {value.dtype}{list(dims(value))}"
            )
    inner.graph.inputs.extend([*(state.inside for state in carried), *(item.inside for item in items)])
    for value in [*(state.following for state in carried), *(each.inside for each in stacked)]:
        inner.name_output(value, inner.unique(f"{name}/out"))
    results = op.emit(
        "Scan",
        *(each.initial for each in carried),
        *(each.sequence for each in items),
        body=inner.graph,
        num_scan_inputs=len(items),
        scan_input_axes=_unless_zero([each.axis for each in items]),
        scan_input_directions=_unless_zero([int(each.backwards) for each in items]),
        scan_output_axes=_unless_zero([each.axis for each in stacked]),
        scan_output_directions=_unless_zero([int(each.backwards) for each in stacked]),
        outputs=len(carried) + len(stacked),
    )
    # `emit` infers nothing for a node with a body.
    for state, value in zip(carried, results):
        value.dtype, value.shape = dtype_of(state.initial), state.initial.shape
    length = dims(items[0].sequence)[items[0].axis]
    for each, value in zip(stacked, results[len(carried) :]):
        value.dtype, value.shape = dtype_of(each.inside), with_axis(each.inside, each.axis, length)
    return list(results[: len(carried)]), list(results[len(carried) :])


def branch(
    op: Builder,
    condition: ir.Value,
    then: Branch,
    otherwise: Branch,
    like: Sequence[ir.Value] | None = None,
    name: str = "branch",
) -> list[ir.Value]:
    """Emit an If (ONNX If-21). The branches may read any value of the graph outside.

    Arguments:
        op: builder of the graph.
        condition: bool, one element.
        then, otherwise: each emits one branch and returns its results, as many as the other.
        like: values whose types and shapes the results have; None: those of `then`.
        name: what the names of the branches begin with.
    """
    graphs = []
    for suffix, fill in (("then", then), ("else", otherwise)):
        inner = op.body(f"{name}/{suffix}")
        for value in fill(inner):
            inner.name_output(value, inner.unique(f"{name}/{suffix}/out"))
        graphs.append(inner.graph)
    return emit_if(op, condition, graphs[0], graphs[1], graphs[0].outputs if like is None else like)


def emit_if(
    op: Builder, condition: ir.Value, then: ir.Graph, otherwise: ir.Graph, like: Sequence[ir.Value]
) -> list[ir.Value]:
    """As `branch`, with branches that are graphs already."""
    results = op.emit("If", condition, then_branch=then, else_branch=otherwise, outputs=len(like))
    for value, model in zip(results, like):
        value.dtype, value.shape = dtype_of(model), model.shape
    return list(results)


def _unless_zero(numbers: list[int]) -> Any:
    """None for the default, which is then left out."""
    return numbers if any(numbers) else None
