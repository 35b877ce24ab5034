"""`scan`: emits a loop whose body is written as a Python function."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from archipel.errors import GraphError
from archipel.graph.build import Builder
from archipel.graph.shapes import dims, dtype_of

Body = Callable[[Builder, list[ir.Value], list[ir.Value]], tuple[Sequence[ir.Value], Sequence[ir.Value]]]
"""(builder of the body, carried values, one item of each sequence) -> (next carried values, values to stack)."""


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
    states = [inner.input(inner.unique(f"{name}/carried"), dtype_of(v), _shape(inner, v, 0)) for v in carried]
    items = [inner.input(inner.unique(f"{name}/item"), dtype_of(v), _shape(inner, v, 1)) for v in sequences]
    following, emitted = body(inner, states, items)
    if len(following) != len(carried):
        raise GraphError(f"scan {name!r}: {len(carried)} values are carried, the body returns {len(following)}")
    # Checked here, where the error can name the loop and the value.
    for before, value in zip(carried, following):
        if value.dtype != before.dtype or len(dims(value)) != len(dims(before)):
            raise GraphError(
                f"scan {name!r}: carried {before.name!r} is {before.dtype}{list(dims(before))}, "
                f"the body returns {value.dtype}{list(dims(value))}"
            )
    for value in (*following, *emitted):
        inner.name_output(value, inner.unique(f"{name}/out"))
    direction = int(reverse)
    results = op.emit(
        "Scan",
        *carried,
        *sequences,
        body=inner.graph,
        num_scan_inputs=len(sequences),
        scan_input_directions=[direction] * len(sequences) if reverse else None,
        # Also for outputs: stacked from the end, so that their items stay beside those they were made of.
        scan_output_directions=[direction] * len(emitted) if reverse and emitted else None,
        outputs=len(carried) + len(emitted),
    )
    # `emit` infers nothing for a node with a body.
    for before, value in zip(carried, results):
        value.dtype, value.shape = dtype_of(before), before.shape
    length = dims(sequences[0])[0]
    for inside, value in zip(emitted, results[len(carried) :]):
        value.dtype, value.shape = dtype_of(inside), ir.Shape([length, *dims(inside)])
    return list(results[: len(carried)]), list(results[len(carried) :])


def _shape(inner: Builder, value: ir.Value, skip: int) -> list[int | str]:
    """The value's shape from axis `skip` on, for an input of the body: unknown sizes get names."""
    return [inner.unique("size") if d is None else d for d in dims(value)[skip:]]
