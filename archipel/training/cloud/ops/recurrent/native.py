"""LSTM, GRU and RNN: PyTorch's own layers where they compute the same, else a loop over time (`recurrent_loop.py`)."""

from __future__ import annotations

from typing import Any

import torch

from archipel.training.cloud.ops.compiling import uncompiled
from archipel.training.cloud.ops.context import NodeContext
from archipel.training.cloud.ops.recurrent.exported import ORDERS, Weights
from archipel.training.cloud.ops.recurrent.loop import DEFAULTS, parse_activations, run_loop
from archipel.training.cloud.ops.table import lowering

_Tensors = list[torch.Tensor]


@lowering("LSTM", "GRU", "RNN")
def recurrent(ctx: NodeContext) -> tuple[torch.Tensor, ...]:
    return lower_recurrent(ctx, None)


def lower_recurrent(ctx: NodeContext, exported: Weights | None) -> tuple[torch.Tensor, ...]:
    """`exported`: PyTorch's own weights of a node for which `find_exported` has found them."""
    op_type = ctx.node.op_type
    outputs = [index < len(ctx.node.outputs) and bool(ctx.node.outputs[index].name) for index in range(3)]
    direction, layout = ctx.text("direction", "forward"), ctx.integer("layout", 0)
    initial = [ctx.tensor(index) if ctx.has(index) else None for index in ((5, 6) if op_type == "LSTM" else (5,))]
    lengths = ctx.tensor(4) if ctx.has(4) else None
    activations = parse_activations(ctx, 2 if direction == "bidirectional" else 1)
    native = _is_native(ctx, activations) and not (op_type == "LSTM" and lengths is not None and outputs[2])
    if native:
        kind = activations[0][0] if op_type == "RNN" else op_type.lower()
        if exported is None:
            weights = ctx.call(_reorder, *_weights(ctx), ORDERS[op_type])
        else:
            weights = [[ctx.load(value) for value in direction] for direction in exported]
        # torch.compile would write the layer out, a step at a time, which takes almost three times as long.
        found = ctx.call(uncompiled(_run_native), kind, direction, layout, ctx.tensor(0), weights, lengths, initial)
    else:
        inputs = (ctx.tensor(0), *_weights(ctx), lengths, initial)
        peepholes = ctx.tensor(7) if ctx.has(7) else None
        flag = ctx.integer("linear_before_reset" if op_type == "GRU" else "input_forget", 0)
        clip = ctx.number("clip", 0.0) if ctx.has_attribute("clip") else None
        found = ctx.call(run_loop, op_type, activations, clip, flag, direction, layout, *inputs, peepholes)
    return tuple(found[index] for index in range(len(ctx.node.outputs)))


def _weights(ctx: NodeContext) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    return ctx.tensor(1), ctx.tensor(2), ctx.tensor(3) if ctx.has(3) else None


def _is_native(ctx: NodeContext, activations: list[tuple[str, float, float]]) -> bool:
    op_type, names = ctx.node.op_type, [name for name, _, _ in activations]
    if ctx.has_attribute("clip") or ctx.integer("input_forget", 0) or ctx.has(7):
        return False
    if op_type == "GRU" and not ctx.integer("linear_before_reset", 0):
        return False
    if op_type == "RNN":
        return set(names) in ({"tanh"}, {"relu"})
    return names == [name.lower() for name in DEFAULTS[op_type]] * (len(names) // len(DEFAULTS[op_type]))


def _run_native(
    kind: str,
    direction: str,
    layout: int,
    x: torch.Tensor,
    weights: list[_Tensors],
    lengths: torch.Tensor | None,
    initial: list[torch.Tensor | None],
) -> tuple[torch.Tensor, ...]:
    """Y and the final states, as the operator has them; the state c of an LSTM is wrong with `lengths`."""
    x = x.transpose(0, 1) if layout else x
    directions, hidden = len(weights), weights[0][1].size(1)
    states = [
        x.new_zeros(directions, x.size(1), hidden) if given is None else given.transpose(0, 1) if layout else given
        for given in initial
    ]
    if lengths is not None:
        y, ends = _run_ragged(kind, direction, x, states, weights, lengths)
    elif direction == "reverse":
        y, ends = _run_layer(kind, x.flip(0), states, weights)
        y = y.flip(0)
    else:
        y, ends = _run_layer(kind, x, states, weights)
    y = y.reshape(y.size(0), y.size(1), directions, hidden)
    if layout:
        return y.transpose(0, 1), *[end.transpose(0, 1) for end in ends]
    return y.transpose(1, 2), *ends


def _reorder(w: torch.Tensor, r: torch.Tensor, b: torch.Tensor | None, order: tuple[int, ...]) -> list[_Tensors]:
    """PyTorch's weights of each direction: of the input, of the state, and the biases of both."""
    # Not by selecting: its gradient would fill a tensor with zeros for each direction.
    directions = list(zip(*(weight.unbind(0) for weight in (w, r, b) if weight is not None)))
    return [
        [_blocks(each[0], order), _blocks(each[1], order), *(_blocks(part, order) for part in _halves(each))]
        for each in directions
    ]


def _halves(each: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return each[2].chunk(2) if len(each) > 2 else ()


def _blocks(weight: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    if len(order) == 1:
        return weight
    blocks = weight.chunk(len(order))
    return torch.cat([blocks[i] for i in order])


def _run_layer(kind: str, x: torch.Tensor, states: _Tensors, weights: list[_Tensors]) -> tuple[torch.Tensor, _Tensors]:
    """One layer of PyTorch's, forwards or in both directions: y [time, batch, directions * hidden], final states."""
    flat = [weight for direction in weights for weight in direction]
    # cuDNN has a gradient only for what ran in training mode; there is no dropout, so it computes the same.
    options: Any = (len(weights[0]) == 4, 1, 0.0, torch.is_grad_enabled(), len(weights) == 2, False)
    states = [state.contiguous() for state in states]
    if kind == "lstm":
        y, *ends = torch.lstm(x, states, flat, *options)
        return y, ends
    function: Any = {"gru": torch.gru, "tanh": torch.rnn_tanh, "relu": torch.rnn_relu}[kind]
    y, end = function(x, states[0], flat, *options)
    return y, [end]


def _run_ragged(
    kind: str,
    direction: str,
    x: torch.Tensor,
    states: _Tensors,
    weights: list[_Tensors],
    lengths: torch.Tensor,
) -> tuple[torch.Tensor, _Tensors]:
    """Sequences of different lengths: over the padding too, and then without it. The host needs no lengths."""
    steps = torch.arange(x.size(0), device=x.device)[:, None]
    lengths = lengths.to(torch.int64)
    inside = (steps < lengths)[:, :, None]
    # Each sequence turned around in its own length, its padding left where it is.
    turned = torch.where(steps < lengths, lengths - 1 - steps, steps)[:, :, None]
    last = (lengths - 1).clamp(min=0)[None, :, None]
    parts, ends = [], []
    for d, own in enumerate(weights):
        backwards = direction == "reverse" or d == 1
        source = x.gather(0, turned.expand_as(x)) if backwards else x
        y, _ = _run_layer(kind, source, [state[d : d + 1] for state in states], [own])
        y = torch.where(inside, y, 0.0)
        ends.append(y.gather(0, last.expand(1, y.size(1), y.size(2))))
        parts.append(y.gather(0, turned.expand_as(y)) if backwards else y)
    end = torch.cat(ends)
    return torch.cat(parts, 2), [end] * len(states)
