"""Rules for operators that only move elements: reshapes, transposes, slices, joins, look-ups."""

from __future__ import annotations

import math
from collections.abc import Sequence

from archipel.converter.frozen.rows import (
    NOTHING,
    Node,
    Result,
    Rows,
    Rule,
    axes_operand,
    positive_axis,
    rule_table,
    untouched_rows,
)
from archipel.graph.shapes import Dim, is_static


def _reshape(n: Node) -> Result:
    rows, shape, out = n.rows(0), n.shape(0), n.out()
    target = n.target(1)
    if rows is None or (target is None and not n.fixed(1)):
        return NOTHING
    # A target of 0 copies the axis: the batch stays first, whatever the other axes become.
    if rows == (0, 1) and target is not None and target.elements[:1] == (0,) and not n.integer("allowzero", 0):
        return n.one(rows)
    before, after = shape[: rows.axis], shape[rows.axis + 1 :]
    if not is_static(before) or not is_static(after):
        return NOTHING
    # In memory the elements are `lead` blocks of the batch, each with `rest` elements of every example.
    lead, rest = _product(before), rows.each * _product(after)
    batch = shape[rows.axis]
    # Where axes of size 1 make several fit, all hold the same elements: the one with the batch's name is tried first.
    axes = sorted(range(len(out)), key=lambda axis: out[axis] != batch)
    places = [_regrouped(out, axis, lead, rest) for axis in axes]
    return n.one(next((place for place in places if place is not None), None))


def _regrouped(out: Sequence[Dim], axis: int, lead: int, rest: int) -> Rows | None:
    """The rows along `axis` of a reshaped tensor, where it still begins each block there and splits no example."""
    before, after = out[:axis], out[axis + 1 :]
    if not is_static(before) or not is_static(after) or _product(before) != lead:
        return None
    inner = _product(after)
    return Rows(axis, rest // inner) if inner and rest and rest % inner == 0 else None


def _product(shape: Sequence[Dim]) -> int:
    return math.prod(d for d in shape if isinstance(d, int))


def _flatten(n: Node) -> Result:
    rows = n.rows(0)
    # At any other axis the batch would be merged with other axes.
    return n.one(Rows(0)) if rows == (0, 1) and positive_axis(n.integer("axis", 1), len(n.shape(0))) == 1 else NOTHING


def _expand(n: Node) -> Result:
    rows, rank = n.rows(0), len(n.out())
    target = n.target(1)
    # The axes of the result that are to have the batch size. A short target lies at the last axes.
    free = (
        [] if target is None else [i for i, d in enumerate(target.elements, rank - len(target.elements)) if d is None]
    )
    place = None if rows is None else Rows(rank - len(n.shape(0)) + rows.axis, rows.each)
    if place is not None:
        # A size of the batch on another axis would make an example's entry depend on how many there are.
        return n.one(place) if n.fixed(1) or (target is not None and free in ([], [place.axis])) else NOTHING
    # A fixed tensor that is repeated for every example has rows: all of them are equal.
    if len(free) != 1 or not n.fixed(0):
        return NOTHING
    index = free[0] - (rank - len(n.shape(0)))
    return n.one(Rows(free[0])) if index < 0 or n.shape(0)[index] == 1 else NOTHING


def _constant_of_shape(n: Node) -> Result:
    # All elements are one number, so the axis of the batch size has rows; with two such axes it would be ambiguous.
    target = n.target(0)
    if target is None or target.elements.count(None) != 1:
        return NOTHING
    return n.one(Rows(target.elements.index(None)))


def _transpose(n: Node) -> Result:
    rows = n.rows(0)
    order = n.node.attributes.get_ints("perm") or tuple(reversed(range(len(n.shape(0)))))
    return n.one(None if rows is None else Rows(list(order).index(rows.axis), rows.each))


def _squeeze(n: Node) -> Result:
    rows, axes = n.rows(0), axes_operand(n, 1, len(n.shape(0)))
    if rows is None or axes is None or rows.axis in axes:
        return NOTHING
    return n.one(Rows(rows.axis - sum(a < rows.axis for a in axes), rows.each))


def _unsqueeze(n: Node) -> Result:
    rows, axes = n.rows(0), axes_operand(n, 1, len(n.out()))
    if rows is None or axes is None:
        return NOTHING
    # The old axes take, in order, the places that the new ones leave.
    free = [a for a in range(len(n.out())) if a not in axes]
    return n.one(Rows(free[rows.axis], rows.each))


def _concat(n: Node) -> Result:
    # Concat does not broadcast: a fixed operand would have an entry of its own for each position of the batch.
    rows = {n.rows(i) for i in range(len(n.inputs))}
    (only,) = rows if len(rows) == 1 else (None,)
    inside = only is not None and positive_axis(n.integer("axis", 0), len(n.out())) != only.axis
    return n.one(only) if inside else NOTHING


def _split(n: Node) -> Result:
    return n.all(untouched_rows(n, n.integer("axis", 0)))


def _slice(n: Node) -> Result:
    rows, starts = n.rows(0), n.content(1)
    # Without axes, starts and ends are those of the first axes.
    axes = axes_operand(n, 3, len(n.shape(0))) if n.given(3) else None if starts is None else list(range(starts.size))
    inside = rows is not None and axes is not None and rows.axis not in axes
    return n.one(rows) if inside and n.rest_fixed() else NOTHING


def _pad(n: Node) -> Result:
    rows, amounts, rank = n.rows(0), n.content(1), len(n.shape(0))
    axes = axes_operand(n, 3, rank) if n.given(3) else list(range(rank))
    if rows is None or amounts is None or axes is None or not n.fixed(2):
        return NOTHING
    # All amounts before come first, then all amounts after.
    padded = {a for a, before, after in zip(axes, amounts, amounts[len(axes) :]) if before or after}
    return n.one(rows) if rows.axis not in padded else NOTHING


def _tile(n: Node) -> Result:
    rows, repeats = n.rows(0), n.content(1)
    return n.one(rows) if rows is not None and repeats is not None and repeats[rows.axis] == 1 else NOTHING


def _gather(n: Node) -> Result:
    data, indices = n.rows(0), n.rows(1)
    axis = positive_axis(n.integer("axis", 0), len(n.shape(0)))
    # The axes of the indices take the place of `axis` in the result.
    if data is not None and n.fixed(1) and data.axis != axis:
        return n.one(data if data.axis < axis else Rows(data.axis - 1 + len(n.shape(1)), data.each))
    if indices is not None and n.fixed(0):  # a look-up in a fixed table: the rows are those of the indices
        return n.one(Rows(axis + indices.axis, indices.each))
    return NOTHING


def _gather_elements(n: Node) -> Result:
    rows = n.rows(0)
    return n.one(untouched_rows(n, n.integer("axis", 0), 2)) if rows is not None and n.rows(1) == rows else NOTHING


def _trilu(n: Node) -> Result:
    rows = n.rows(0)  # it takes a triangle of the last two axes, the same one for all before
    return n.one(rows) if rows is not None and rows.axis < len(n.shape(0)) - 2 and n.rest_fixed() else NOTHING


RULES: dict[str, Rule] = rule_table(
    {
        "Reshape": _reshape,
        "Flatten": _flatten,
        "Expand": _expand,
        "ConstantOfShape": _constant_of_shape,
        "Transpose": _transpose,
        "Squeeze": _squeeze,
        "Unsqueeze": _unsqueeze,
        "Concat": _concat,
        "Split": _split,
        "Slice": _slice,
        "Pad": _pad,
        "Tile": _tile,
        "Gather": _gather,
        "GatherElements": _gather_elements,
        "Trilu": _trilu,
    }
)
