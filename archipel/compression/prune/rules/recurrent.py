"""Recurrent layers: a hidden unit has a row in every gate, a column in the recurrence, and a state."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from archipel.compression.prune.cuts import Cuts
from archipel.compression.prune.links import Links, Opaque, Role

_UNKNOWN = "the number of hidden units is not known"
# With these a unit whose weights, biases and initial state are zero stays zero.
_USUAL = {"LSTM": {"Sigmoid", "Tanh"}, "GRU": {"Sigmoid", "Tanh"}, "RNN": {"Tanh", "Relu"}}


def recurrent(node: ir.Node, links: Links) -> None:
    """LSTM, GRU and RNN in the layout [time, batch, input]; both directions lose the same units."""
    if node.attributes.get_int("layout", 0):
        raise Opaque("layout 1 is not supported")
    if not set(node.attributes.get_strings("activations", ())) <= _USUAL[node.op_type]:
        raise Opaque("its activations are not the default ones")
    source, weight, recurrence = node.inputs[:3]
    if source is None or weight is None or recurrence is None:
        raise Opaque("an input is missing")
    # The last axis of the recurrence has one slot for each hidden unit; everything else is tied to these.
    unit = links.slots(recurrence, 2)
    if unit is None:
        raise Opaque(_UNKNOWN)
    optional = dict(enumerate(node.inputs[3:], start=3))
    # Gates lie behind one another along axis 1: [directions, gates * hidden, ...].
    stacked = [(weight, 1), (recurrence, 1)]
    if optional.get(3) is not None:
        stacked.append((optional[3], 1))  # type: ignore[arg-type]
    if optional.get(7) is not None:
        raise Opaque("peepholes are not supported")
    for value, axis in stacked:
        _tie_blocks(links, value, axis, unit)
        links.mark(value, axis, Role.WEIGHT if value in (weight, recurrence) else Role.AFFINE)
    links.mark(recurrence, 2, Role.CONSUMER)
    links.link(source, 2, weight, 2, None)
    links.mark(weight, 2, Role.CONSUMER)
    links.require_zero(
        [(source, 2)], f"{node.op_type} {node.name!r}: its input is not zero where the weights that make it are"
    )
    states = [value for place, value in optional.items() if place in (5, 6) and value is not None]
    for state in states:
        _tie_blocks(links, state, 2, unit)
        links.mark(state, 2, Role.AFFINE)
    zero = ("all", [(weight, 1), (recurrence, 1), *stacked[2:], *((state, 2) for state in states)])
    for value in node.outputs:
        if value.name:
            _tie_blocks(links, value, links.rank(value) - 1, unit)
            links.declare_zero(value, links.rank(value) - 1, zero)
    _fix_places(node, links, source, states)


def cut_hidden(node: ir.Node, cuts: Cuts) -> None:
    recurrence = node.inputs[2]
    kept = cuts.kept_indices(recurrence, 2)
    if kept is not None:
        node.attributes["hidden_size"] = ir.AttrInt64("hidden_size", int(kept.sum()))


def _fix_places(node: ir.Node, links: Links, source: ir.Value, states: list[ir.Value]) -> None:
    """Keep the axes of time, batch and direction."""
    for value in (source, *node.outputs):
        if value.name:
            for axis in range(links.rank(value) - 1):
                links.fix(value, axis, "an axis of time, batch or direction")
    for stored in (*node.inputs[1:4], *states):
        if stored is not None:
            links.fix(stored, 0, "the axis of directions")


def _tie_blocks(links: Links, value: ir.Value, axis: int, unit: np.ndarray) -> None:
    """Tie each block of an axis, such as a gate, to the hidden units."""
    slots = links.slots(value, axis)
    if slots is None or len(slots) % len(unit):
        raise Opaque(_UNKNOWN)
    for block in slots.reshape(-1, len(unit)):
        links.tie(block, unit)
