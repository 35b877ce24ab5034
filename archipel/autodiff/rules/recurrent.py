"""What LSTM, GRU and RNN share: their sequences, directions and lengths, and the products around the loops.

In the loops features come first and the batch last. Their products then have the weights on the left, where ONNX
Runtime reads them as they are; weights on the right it would rearrange at every step. Everything that does not need
the state of the step before (products with inputs, derivatives, gradients of weights) happens outside, for all steps
at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import onnx_ir as ir

from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Gradients
from archipel.autodiff.rules.activations import Activation, activations
from archipel.graph.build import Builder
from archipel.graph.control import Body, scan
from archipel.graph.shapes import Dim, dims


@dataclass
class Direction:
    """One direction of a layer.

    x [time, batch, features], w [gates * hidden, features], r [gates * hidden, hidden], biases [gates * hidden] for
    each of them, peepholes [3 * hidden]; `initial`: h and, in an LSTM, c, each [hidden, batch]. `backwards`: the loop
    starts at the last step. `ragged`: what follows a sequence's end is there, but does not count.
    """

    op: Builder
    hidden: int
    x: ir.Value
    w: ir.Value
    r: ir.Value
    biases: tuple[ir.Value, ir.Value] | None
    peepholes: ir.Value | None
    initial: list[ir.Value]
    activations: tuple[Activation, ...]
    backwards: bool
    ragged: bool

    def project(self, bias: ir.Value | None) -> ir.Value:
        """w x + bias for all steps, [time, gates * hidden, batch]."""
        op = self.op
        column = None if bias is None else op.Unsqueeze(bias, [1])
        product = op.Gemm(self.w, self.rows(self.x), column, transB=1)
        steps, batch = dims(self.x)[:2]
        width = dims(self.w)[0]
        if isinstance(batch, int):
            split = op.Reshape(product, [width, -1, batch])
        elif isinstance(steps, int):
            split = op.Reshape(product, [width, steps, -1])
        else:
            split = op.Reshape(product, op.Concat([width], op.Shape(self.x, start=0, end=2), axis=0))
        result: ir.Value = op.Transpose(split, perm=[1, 0, 2])
        result.shape = ir.Shape([steps, width, batch])
        return result

    def loop(
        self, body: Body, carried: Sequence[ir.Value], sequences: Sequence[ir.Value], gradient: bool = False
    ) -> tuple[list[ir.Value], list[ir.Value]]:
        """Scan over the steps, with `gradient` in the opposite order."""
        name = self.op.unique("backward" if gradient else "forward")
        return scan(self.op, body, carried, sequences, reverse=self.backwards != gradient, name=name)

    def rows(self, sequence: ir.Value) -> ir.Value:
        """[time, batch, n] -> [time * batch, n]."""
        result: ir.Value = self.op.Reshape(sequence, [-1, dims(sequence)[2]])
        return result

    def columns(self, sequence: ir.Value) -> ir.Value:
        """[time, n, batch] -> [n, time * batch]."""
        result: ir.Value = self.op.Reshape(self.op.Transpose(sequence, perm=[1, 0, 2]), [dims(sequence)[1], -1])
        return result

    def previous(self, states: ir.Value) -> ir.Value:
        """The hidden state before each step, [time * batch, hidden], from those after it [time, hidden, batch]."""
        op = self.op
        after = batch_first(op, states)
        start = op.Unsqueeze(op.Transpose(self.initial[0], perm=[1, 0]), [0])
        if self.backwards:
            return self.rows(op.Concat(op.Slice(after, [1], [2**62], [0]), start, axis=0))
        return self.rows(op.Concat(start, op.Slice(after, [0], [-1], [0]), axis=0))

    def zeros(self) -> ir.Value:
        """A state of zeros, [hidden, batch]."""
        return self.op.full_like(self.initial[0], 0.0)


@dataclass
class Forward:
    """`states`: after each step, [time, hidden, batch], h and, where a sequence may end early, c. `final`: after the
    last step. `kept`: what the gradient needs besides."""

    states: list[ir.Value]
    final: list[ir.Value]
    kept: list[ir.Value]


@dataclass
class Cotangents:
    """Of the states after each step and after the last one, in the shapes of `Forward`; None for zeros."""

    states: list[ir.Value | None]
    final: list[ir.Value | None]


@dataclass
class Backward:
    """`gates`: gradient of w x + bias, [time, gates * hidden, batch]. `recurrent`: pairs whose products, one below the
    other, are the gradient of r: gradients [n, time * batch], what they multiplied [time * batch, hidden].
    `initial`: of the initial states, [hidden, batch]. `peepholes`: [3 * hidden]."""

    gates: ir.Value
    recurrent: list[tuple[ir.Value, ir.Value]]
    initial: list[ir.Value]
    peepholes: ir.Value | None = None


class Cell(Protocol):
    """What happens in the loops. `functions`: the default activations; `states`: 2 if there is c besides h."""

    functions: tuple[str, ...]
    states: int

    def forward(self, d: Direction) -> Forward: ...

    def backward(self, d: Direction, run: Forward, cotangents: Cotangents) -> Backward: ...


def differentiate_layer(ctx: RuleContext, cell: Cell) -> Gradients:
    """Replace the node by loops that keep what the gradient needs, and emit the loops of the gradient.

    Inputs X, W, R, B, sequence_lens, initial_h, initial_c, P; outputs Y, Y_h, Y_c (ONNX LSTM-14, GRU-14, RNN-14).
    """
    return _Layer(ctx, cell).gradients()


class _Layer:
    def __init__(self, ctx: RuleContext, cell: Cell) -> None:
        self.ctx, self.cell, self.op = ctx, cell, ctx.op
        shape = dims(ctx.input(2))
        if not (isinstance(shape[0], int) and isinstance(shape[2], int) and isinstance(dims(ctx.input(1))[2], int)):
            ctx.refuse("W and R", f"their shapes must be fixed, that of R is {list(shape)}")
        self.count, self.hidden = shape[0], shape[2]
        self.reverse = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[
            ctx.attribute("direction", "forward")
        ]
        self.layout = ctx.attribute("layout", 0)
        self.functions = activations(ctx, cell.functions, len(self.reverse))
        self.lengths = ctx.optional(4)
        self.last = self.valid = None

    def gradients(self) -> Gradients:
        ctx, op = self.ctx, self.op
        with op.after(ctx.node):
            directions = self._directions()
            runs = [self.cell.forward(d) for d in directions]
            self._replace(directions, runs)
        found = []
        for index, (d, run) in enumerate(zip(directions, runs)):
            found.append(self.cell.backward(d, run, self._cotangents(index)))
        flat = [d.columns(gradient.gates) for d, gradient in zip(directions, found)]
        grad_x = None
        for index, (d, gates) in enumerate(zip(directions, flat)):
            part = self._flip(op.reshape_like(op.Gemm(gates, d.w, transA=1), d.x), index)
            grad_x = part if grad_x is None else op.Add(grad_x, part)
        grad_w = self._stack([op.MatMul(gates, d.rows(d.x)) for d, gates in zip(directions, flat)])
        grad_r = self._stack([op.Concat(*(op.MatMul(a, b) for a, b in g.recurrent), axis=0) for g in found])
        grad_b = None
        if ctx.optional(3) is not None:
            parts = [[gates, *(a for a, _ in g.recurrent)] for gates, g in zip(flat, found)]
            grad_b = self._stack([op.Concat(*(op.ReduceSum(a, [1], keepdims=0) for a in p), axis=0) for p in parts])
        gradients = [self._swap(grad_x), grad_w, grad_r, grad_b, None]
        for state in range(self.cell.states):
            given = ctx.optional(5 + state) is not None
            rows = [op.Transpose(gradient.initial[state], perm=[1, 0]) for gradient in found] if given else []
            gradients.append(self._swap(self._stack(rows)) if given else None)
        if ctx.optional(7) is not None:
            gradients.append(self._stack([gradient.peepholes for gradient in found]))
        return gradients

    def _directions(self) -> list[Direction]:
        ctx, op = self.ctx, self.op
        x = self._swap(ctx.input(0))
        if self.lengths is not None:
            self._read_lengths(x)
        bias, initial = ctx.optional(3), [self._swap(ctx.optional(5 + state)) for state in range(self.cell.states)]
        found = []
        for index, reverse in enumerate(self.reverse):
            given = [None if v is None else op.Transpose(self._pick(v, index), perm=[1, 0]) for v in initial]
            found.append(
                Direction(
                    op,
                    self.hidden,
                    self._flip(x, index),
                    self._pick(ctx.input(1), index),
                    self._pick(ctx.input(2), index),
                    None if bias is None else op.Split(self._pick(bias, index), num_outputs=2, axis=0, _outputs=2),
                    None if ctx.optional(7) is None else self._pick(ctx.input(7), index),
                    [self._zeros(x) if v is None else v for v in given],
                    self.functions[index],
                    reverse and self.lengths is None,
                    self.lengths is not None,
                )
            )
        return found

    def _replace(self, directions: list[Direction], runs: list[Forward]) -> None:
        ctx, op = self.ctx, self.op
        rows = []
        for index, run in enumerate(runs):
            states = run.states[0] if self.valid is None else op.Mul(run.states[0], self.valid)
            rows.append(op.Unsqueeze(self._flip(batch_first(op, states), index), [1]))
        y = rows[0] if len(rows) == 1 else op.Concat(*rows, axis=1)
        values = [op.Transpose(y, perm=[2, 0, 1, 3]) if self.layout else y]
        for state in range(self.cell.states):
            ends = [
                run.final[state]
                if self.last is None
                else op.ReduceSum(op.Mul(run.states[state], self.last), [0], keepdims=0)
                for run in runs
            ]
            values.append(self._swap(self._stack([op.Transpose(end, perm=[1, 0]) for end in ends])))
        for old, new in zip(ctx.outputs, values):
            if old.dtype is None:  # an output that is left out
                old.dtype, old.shape = new.dtype, new.shape
        ctx.replace(*values[: len(ctx.outputs)])

    def _cotangents(self, index: int) -> Cotangents:
        """For one direction, in the order in which it goes through the steps."""
        ctx, op = self.ctx, self.op
        y, *ends = [*ctx.cotangents, None, None][: 1 + self.cell.states]
        if y is not None:
            y = op.Transpose(y, perm=[1, 2, 0, 3]) if self.layout else y
            y = batch_first(op, self._flip(self._pick(y, index, axis=1), index))
        final = [None if end is None else op.Transpose(self._pick(self._swap(end), index), perm=[1, 0]) for end in ends]
        states = [y, *[None] * (self.cell.states - 1)]
        if self.last is None:
            return Cotangents(states, final)
        # A sequence's end lies somewhere in the loop: its cotangent joins there.
        if y is not None:
            states[0] = op.Mul(y, self.valid)
        for state, end in enumerate(final):
            if end is not None:
                placed, here = op.Mul(end, self.last), states[state]
                states[state] = placed if here is None else op.Add(here, placed)
        return Cotangents(states, [None] * self.cell.states)

    def _read_lengths(self, x: ir.Value) -> None:
        """`valid` and `last`: 1 before a sequence's end and at its last step, else 0; [time, 1, batch]."""
        op = self.op
        steps = op.Range(0, op.Squeeze(op.Shape(x, start=0, end=1), [0]), 1)
        step = op.Unsqueeze(op.Cast(steps, to=ir.DataType.INT32), [1, 2])
        step.shape = ir.Shape([dims(x)[0], 1, 1])
        self.valid = op.Cast(op.Less(step, self.lengths), to=x.dtype)
        self.last = op.Cast(op.Equal(op.Add(step, op.constant(1, ir.DataType.INT32)), self.lengths), to=x.dtype)

    def _flip(self, sequence: ir.Value, index: int) -> ir.Value:
        """[time, batch, n] of the reverse direction: each sequence's valid part back to front."""
        if self.lengths is None or not self.reverse[index]:
            return sequence
        lengths = self.op.Cast(self.lengths, to=ir.DataType.INT64)
        result: ir.Value = self.op.ReverseSequence(sequence, lengths, time_axis=0, batch_axis=1)
        return result

    def _zeros(self, x: ir.Value) -> ir.Value:
        op, batch = self.op, dims(x)[1]
        shape: ir.Value | list[Dim] = [self.hidden, batch]
        if not isinstance(batch, int):
            shape = op.Concat([self.hidden], op.Shape(x, start=1, end=2), axis=0)
        result: ir.Value = op.Expand(op.constant(0.0, x.dtype), shape)
        result.shape = ir.Shape([self.hidden, batch])
        return result

    def _swap(self, value: ir.Value | None) -> ir.Value | None:
        """Between the two layouts of inputs and states: [time or directions, batch, n], or the batch first."""
        return value if value is None or not self.layout else self.op.Transpose(value, perm=[1, 0, 2])

    def _pick(self, value: ir.Value, index: int, axis: int = 0) -> ir.Value:
        if len(self.reverse) == 1:
            return self.op.Squeeze(value, [axis])
        return self.op.Gather(value, index, axis=axis)

    def _stack(self, values: Sequence[ir.Value]) -> ir.Value:
        rows = [self.op.Unsqueeze(value, [0]) for value in values]
        return rows[0] if len(rows) == 1 else self.op.Concat(*rows, axis=0)


def batch_first(op: Builder, sequence: ir.Value) -> ir.Value:
    """[time, n, batch] <-> [time, batch, n]."""
    result: ir.Value = op.Transpose(sequence, perm=[0, 2, 1])
    return result
