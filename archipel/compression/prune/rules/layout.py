"""Operators that move elements: Transpose, Concat, Split, Slice, Gather and the like."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from archipel.compression.prune.cuts import Cuts
from archipel.compression.prune.links import Links, Opaque, Role
from archipel.graph.shapes import constant_array

_ALONE = "a single index of it is used"


def transpose(node: ir.Node, links: Links) -> None:
    source = _source(node)
    perm = node.attributes.get_ints("perm") or list(range(links.rank(source)))[::-1]
    for j, i in enumerate(perm):
        links.join(source, i, node.outputs[0], j)


def squeeze(node: ir.Node, links: Links) -> None:
    _join_but(links, _source(node), node.outputs[0], _changed_axes(node, links.rank(node.inputs[0])), shorter=True)


def unsqueeze(node: ir.Node, links: Links) -> None:
    _join_but(links, _source(node), node.outputs[0], _changed_axes(node, links.rank(node.outputs[0])), shorter=False)


def concat(node: ir.Node, links: Links) -> None:
    output = node.outputs[0]
    along = links.axis(output, node.attributes.get_int("axis", 0))
    inputs = [value for value in node.inputs if value is not None]
    for axis in range(links.rank(output)):
        if axis != along:
            for value in inputs:
                links.join(value, axis, output, axis)
    _tie_parts(links, output, inputs, along, joined=True)


def split(node: ir.Node, links: Links) -> None:
    source = _source(node)
    along = links.axis(source, node.attributes.get_int("axis", 0))
    for output in node.outputs:
        for axis in range(links.rank(source)):
            if axis != along:
                links.join(source, axis, output, axis)
    _tie_parts(links, source, list(node.outputs), along, joined=False)


def cut_split(node: ir.Node, cuts: Cuts) -> None:
    source = _source(node)
    along = cuts.links.axis(source, node.attributes.get_int("axis", 0))
    if cuts.kept_indices(source, along) is None:
        return
    sizes = [cuts.size(output, along) for output in node.outputs]
    # Parts that differ in size need their sizes as an input.
    node.attributes.pop("num_outputs", None)
    node.resize_inputs(2)
    cuts.set_input(node, 1, [size for size in sizes if size is not None])


def slice_(node: ir.Node, links: Links) -> None:
    source, output = _source(node), node.outputs[0]
    rank, sizes = links.rank(source), links.shape(source)
    axes = _slice_axes(node, rank)
    bounds = _bounds(node)
    for axis in range(rank):
        if axis not in axes:
            links.join(source, axis, output, axis)
            continue
        slots, size = links.slots(source, axis), sizes[axis]
        if slots is None or bounds is None or size is None:
            _fix_both(links, source, output, axis, "the bounds of the Slice are not constant")
            continue
        # NumPy's slices treat bounds beyond the ends as ONNX does.
        window = slice(*(int(bound[axes.index(axis)]) for bound in bounds))
        if window.step != 1:
            _fix_both(links, source, output, axis, "it is read with a step")
            continue
        _tie_or_fix(links, slots[window], links.slots(output, axis))
        links.declare_zero(output, axis, (source, axis))


def cut_slice(node: ir.Node, cuts: Cuts) -> None:
    source = _source(node)
    rank, bounds = cuts.links.rank(source), _bounds(node)
    axes = _slice_axes(node, rank)
    if bounds is None or all(cuts.kept_indices(source, axis) is None for axis in axes):
        return
    starts, ends = bounds[0].copy(), bounds[1].copy()
    for place, axis in enumerate(axes):
        kept = cuts.kept_indices(source, axis)
        if kept is not None:
            first, last, _ = slice(int(starts[place]), int(ends[place]), 1).indices(len(kept))
            # A bound moves forward by as many indices as go in front of it. An empty slice stays empty.
            starts[place], ends[place] = kept[:first].sum(), kept[: max(first, last)].sum()
    cuts.set_input(node, 1, starts)
    cuts.set_input(node, 2, ends)


def gather(node: ir.Node, links: Links) -> None:
    source, indices, output = _source(node), node.inputs[1], node.outputs[0]
    if indices is None:
        raise Opaque("an input is missing")
    along = links.axis(source, node.attributes.get_int("axis", 0))
    wide = links.rank(indices)
    for axis in range(links.rank(source)):
        if axis != along:
            # Of a table that activations look up, such as an embedding, the other axes are output channels.
            role = Role.WEIGHT if not links.is_stored(indices) else Role.AFFINE
            links.join(source, axis, output, axis if axis < along else axis + wide - 1, role)
    slots, places = links.slots(source, along), constant_array(indices)
    if places is None or places.ndim != 1 or slots is None:
        links.fix(source, along, _ALONE if places is not None else "which of it is read depends on the input")
        for axis in range(wide):
            if places is None:
                links.link(indices, axis, output, along + axis, None)
            else:
                links.fix(output, along + axis, _ALONE)
        return
    # Constant places pick channels: each output index is the input index that it picks.
    _tie_or_fix(links, slots[places], links.slots(output, along))
    links.declare_zero(output, along, (source, along))


def cut_gather(node: ir.Node, cuts: Cuts) -> None:
    source = _source(node)
    along = cuts.links.axis(source, node.attributes.get_int("axis", 0))
    kept, places = cuts.kept_indices(source, along), constant_array(node.inputs[1])
    if kept is None or places is None:
        return
    places = places % len(kept)
    # Places whose index goes are left out; for the others the cumulative sum gives the new index.
    cuts.set_input(node, 1, (np.cumsum(kept) - 1)[places[kept[places]]])


def tile(node: ir.Node, links: Links) -> None:
    source, repeats = _source(node), constant_array(node.inputs[1])
    if repeats is None:
        raise Opaque("the number of repeats is not constant")
    for axis, count in enumerate(repeats):
        # Each repeat of an axis would have to lose the same index.
        if count == 1:
            links.join(source, axis, node.outputs[0], axis)
        else:
            _fix_both(links, source, node.outputs[0], axis, "it is repeated")


def filled(node: ir.Node, links: Links) -> None:
    """ConstantOfShape: makes as many elements as its input says."""
    fill = node.attributes.get("value")
    zero = fill is None or not np.any(fill.as_tensor().numpy())
    for axis in range(links.rank(node.outputs[0])):
        links.declare_zero(node.outputs[0], axis, zero)


def _tie_parts(links: Links, whole: ir.Value, parts: list[ir.Value], along: int, joined: bool) -> None:
    """Tie the parts of a Concat (`joined`) or Split to their ranges of the whole."""
    slots = links.slots(whole, along)
    sizes = [links.shape(part)[along] for part in parts]
    known = [size for size in sizes if size is not None]
    # The parts must cover the whole, or an offset would tie the wrong indices.
    if slots is None or len(known) < len(sizes) or sum(known) != len(slots):
        for value in (whole, *parts):
            links.fix(value, along, "the sizes of its parts are not known")
        return
    start = 0
    for part, size in zip(parts, known):
        _tie_or_fix(links, slots[start : start + size], links.slots(part, along))
        if joined:
            if not links.is_stored(whole):
                links.mark(part, along, Role.AFFINE)
            links.declare_zero(whole, along, (part, along))
        else:
            links.declare_zero(part, along, (whole, along))
        start += size


def _tie_or_fix(links: Links, ours: np.ndarray, theirs: np.ndarray | None) -> None:
    """Tie slots in pairs. A part of size 1 has no slots of its own, so its index of the whole stays."""
    if theirs is None or len(ours) != len(theirs):
        links.fix_slots(ours, _ALONE)
        if theirs is not None:
            links.fix_slots(theirs, _ALONE)
    else:
        links.tie(ours, theirs)


def _fix_both(links: Links, source: ir.Value, output: ir.Value, axis: int, why: str) -> None:
    links.fix(source, axis, why)
    links.fix(output, axis, why)


def _join_but(links: Links, source: ir.Value, output: ir.Value, left_out: set[int], shorter: bool) -> None:
    """Join the axes in order, without those that the output (`shorter`) or the source lacks."""
    rank = links.rank(source if shorter else output)
    rest = [axis for axis in range(rank) if axis not in left_out]
    for place, axis in enumerate(rest):
        links.join(source, *((axis, output, place) if shorter else (place, output, axis)))


def _changed_axes(node: ir.Node, rank: int) -> set[int]:
    """The axes that a Squeeze or Unsqueeze names, from 0."""
    axes = constant_array(node.inputs[1]) if len(node.inputs) > 1 else None
    if axes is None:
        raise Opaque("its axes are not constant")
    return {int(axis) % rank for axis in axes.reshape(-1)}


def _slice_axes(node: ir.Node, rank: int) -> list[int]:
    given = node.inputs[3] if len(node.inputs) > 3 else None
    if given is None:
        starts = node.inputs[1]
        length = None if starts is None or starts.shape is None else starts.shape[0]
        if not isinstance(length, int):
            raise Opaque("its axes are not constant")
        return list(range(length))
    axes = constant_array(given)
    if axes is None:
        raise Opaque("its axes are not constant")
    return [int(axis) % rank for axis in axes]


def _bounds(node: ir.Node) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    starts, ends = constant_array(node.inputs[1]), constant_array(node.inputs[2])
    given = node.inputs[4] if len(node.inputs) > 4 else None
    if starts is None or ends is None:
        return None
    steps = np.ones_like(starts) if given is None else constant_array(given)
    return None if steps is None else (starts, ends, steps)


def _source(node: ir.Node) -> ir.Value:
    if node.inputs[0] is None:
        raise Opaque("an input is missing")
    return node.inputs[0]
