"""What LSTM, GRU and RNN share: sequences, directions and lengths, and the products around the loops.

Backpropagation through time (Werbos 1990): a Scan forwards that keeps what the gradient needs, a Scan backwards that
carries the cotangents of the state.

In the loops features come first and the batch last. The weights are then the left operands of the products, where ONNX
Runtime reads them as they are; it would rearrange right operands at every step. Everything that does not need the state
of the step before (products with inputs, derivatives, gradients of weights) happens outside, for all steps at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import onnx_ir as ir

from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Gradients
from archipel.autodiff.rules.recurrent_activation import Activation, activations
from archipel.graph.build import Builder
from archipel.graph.control import Body, scan
from archipel.graph.shapes import dims, dtype_of, fixed_sizes, is_static

Values = list[ir.Value]


@dataclass
class Direction:
    """One direction of a layer.

    x [time, batch, features], w [gates * hidden, features], r [gates * hidden, hidden], biases [gates * hidden] of
    w and r, peepholes [3 * hidden]; `initial`: h and, in an LSTM, c, each [hidden, batch]. `backwards`: the loop starts
    at the last step. `ragged`: sequences have lengths of their own; the loop runs over the padding behind them as well,
    and its results there do not count. `wants_inputs`: the gradient of x is needed.
    """

    op: Builder
    hidden: int
    x: ir.Value
    w: ir.Value
    r: ir.Value
    biases: tuple[ir.Value, ir.Value] | None
    peepholes: ir.Value | None
    initial: Values
    activations: tuple[Activation, ...]
    backwards: bool
    ragged: bool
    wants_inputs: bool

    def factors(self, bias: ir.Value | None) -> tuple[ir.Value, ir.Value]:
        """x and w, with the bias as one more column of w, beside ones: [time, batch, n] and [gates * hidden, n]."""
        op, w, x = self.op, self.w, self.x
        if bias is None:
            return x, w
        # An addition would read and write the whole product again.
        beside = op.Pad(x, [0, 0, 0, 0, 0, 1], op.constant(1.0, dtype_of(x)))
        beside.shape = ir.Shape([*dims(x)[:2], fixed_sizes(dims(w))[1] + 1])  # which inference does not find
        return beside, op.Concat(w, op.Unsqueeze(bias, [1]), axis=1)

    def project(self, x: ir.Value, w: ir.Value) -> ir.Value:
        """w x + bias for all steps, [time, gates * hidden, batch], from `factors`."""
        # One product for all steps and examples; Einsum, as ONNX Runtime would make a Transpose part of the product,
        # which then is one for each step. Those take less time at batch 32 and more at batch 10 and below.
        return batch_first(self.op, self.op.MatMul(x, self.op.Einsum(w, equation="gx->xg")))

    def to_inputs(self, gates: ir.Value) -> ir.Value:
        """The gradient of x, [time, batch, features], from that of w x + bias."""
        op, (width, _) = self.op, fixed_sizes(dims(self.w))
        return op.reshape_like(op.Gemm(self.columns(gates, width), self.w, transA=1), self.x)

    def loop(
        self, body: Body, carried: Sequence[ir.Value], sequences: Sequence[ir.Value], gradient: bool = False
    ) -> tuple[list[ir.Value], list[ir.Value]]:
        """Scan over the steps in this direction; with `gradient` in the opposite one."""
        name = self.op.unique("backward" if gradient else "forward")
        return scan(self.op, body, carried, sequences, reverse=self.backwards != gradient, name=name)

    def rows(self, sequence: ir.Value, width: int) -> ir.Value:
        """[time, batch, width] -> [time * batch, width]."""
        return self.op.Reshape(sequence, [-1, width])

    def columns(self, sequence: ir.Value, width: int) -> ir.Value:
        """[time, width, batch] -> [width, time * batch]."""
        return self.op.Reshape(self.op.Transpose(sequence, perm=[1, 0, 2]), [width, -1])

    def previous(self, states: ir.Value) -> ir.Value:
        """The hidden state before each step, [time * batch, hidden], from those after it [time, hidden, batch]."""
        op = self.op
        after = batch_first(op, states)
        # The states moved on by one step, with the initial one in front; at the other end if the loop runs backwards.
        start = op.Unsqueeze(op.Transpose(self.initial[0], perm=[1, 0]), [0])
        if self.backwards:
            return self.rows(op.Concat(op.Slice(after, [1], [2**62], [0]), start, axis=0), self.hidden)
        return self.rows(op.Concat(start, op.Slice(after, [0], [-1], [0]), axis=0), self.hidden)

    def bias(self) -> ir.Value | None:
        """The sum of both biases."""
        return None if self.biases is None else self.op.Add(*self.biases)


@dataclass
class Forward:
    """`states`: h and, where a sequence may end early, c after each step, [time, hidden, batch]. `final`: h and c after
    the last step. `kept`: further values of each step that the gradient needs."""

    states: Values
    final: Values
    kept: Values


@dataclass
class Cotangents:
    """Cotangents of the states after each step and after the last one, in the shapes of `Forward`; None for zeros."""

    states: list[ir.Value | None]
    final: list[ir.Value | None]

    @property
    def given(self) -> Values:
        """The cotangents of each step that are not zero: sequences for the loop of the gradient."""
        return [value for value in self.states if value is not None]

    def start(self, d: Direction) -> Values:
        """The cotangents that the loop of the gradient starts with."""
        return [d.op.full_like(d.initial[0], 0.0) if value is None else value for value in self.final]


@dataclass
class Backward:
    """Gradients of one direction.

    `gates`: of w x + bias, [time, gates * hidden, batch]. `recurrent`: pairs (gradients [n, time * batch], their
    factors [time * batch, hidden]) whose products, one below the other, are the gradient of r. `initial`: of the
    initial states, [hidden, batch]. `peepholes`: [3 * hidden]. `inputs`: of x, [time, batch, features], where the cell
    has it already.
    """

    gates: ir.Value
    recurrent: list[tuple[ir.Value, ir.Value]]
    initial: Values
    peepholes: ir.Value | None = None
    inputs: ir.Value | None = None


class Cell(Protocol):
    """The equations of one operator. `functions`: its default activations; `states`: 2 with c besides h, else 1."""

    functions: tuple[str, ...]
    states: int

    def forward(self, d: Direction) -> Forward: ...

    def backward(self, d: Direction, run: Forward, cotangents: Cotangents) -> Backward: ...


def differentiate_layer(ctx: RuleContext, cell: Cell) -> Gradients:
    """Replace the node by loops that keep intermediate values, and emit the loops of the gradient.

    Inputs X, W, R, B, sequence_lens, initial_h, initial_c, P; outputs Y, Y_h, Y_c (ONNX LSTM-14, GRU-14, RNN-14).
    """
    # The forward loops go where the node is, before its readers; those of the gradient at the end of the graph.
    with ctx.op.after(ctx.node):
        layer = _Layer(ctx, cell)
        directions = layer.directions()
        runs = [cell.forward(d) for d in directions]
        layer.replace(runs)
    backward = [cell.backward(d, run, layer.cotangents(i)) for i, (d, run) in enumerate(zip(directions, runs))]
    return layer.gradients(directions, backward)


class _Layer:
    """The node's inputs and attributes in one form: layout 0, so that time comes before the batch."""

    def __init__(self, ctx: RuleContext, cell: Cell) -> None:
        self.ctx, self.cell, self.op = ctx, cell, ctx.op
        w, r = dims(ctx.input(1)), dims(ctx.input(2))
        hidden = r[2]
        if not (is_static(w) and is_static(r) and isinstance(hidden, int)):
            ctx.refuse("W and R", f"their shapes must be fixed, they are {list(w)} and {list(r)}")
        self.hidden = hidden
        direction = ctx.attribute("direction", "forward")
        self.reverse = [False, True] if direction == "bidirectional" else [direction == "reverse"]
        self.layout = ctx.attribute("layout", 0)
        self.functions = activations(ctx, cell.functions, len(self.reverse))
        self.lengths = ctx.optional(4)
        self.x = self._swap(ctx.input(0))
        self.valid, self.last = self._masks()

    def directions(self) -> list[Direction]:
        return [self._direction(index) for index in range(len(self.reverse))]

    def _direction(self, index: int) -> Direction:
        ctx, op = self.ctx, self.op
        bias, peepholes = ctx.optional(3), ctx.optional(7)
        return Direction(
            op=op,
            hidden=self.hidden,
            x=self._flip(self.x, index),
            w=self._pick(ctx.input(1), index),
            r=self._pick(ctx.input(2), index),
            biases=None if bias is None else self._halves(self._pick(bias, index)),
            peepholes=None if peepholes is None else self._pick(peepholes, index),
            initial=[self._initial(ctx.optional(5 + state), index) for state in range(self.cell.states)],
            activations=self.functions[index],
            # With lengths `_flip` reverses each sequence instead: their last steps are at different places.
            backwards=self.reverse[index] and self.lengths is None,
            ragged=self.lengths is not None,
            wants_inputs=self.ctx.wants(0),
        )

    def _initial(self, given: ir.Value | None, index: int) -> ir.Value:
        """The initial state, [hidden, batch]; zeros if the node leaves it out."""
        op, batch = self.op, dims(self.x)[1]
        if given is not None:
            return self._column(given, index)
        shape: ir.Value | list[int] = (
            [self.hidden, batch]
            if isinstance(batch, int)
            else op.Concat([self.hidden], op.Shape(self.x, start=1, end=2), axis=0)
        )
        zeros = op.Expand(op.constant(0.0, dtype_of(self.x)), shape)
        zeros.shape = ir.Shape([self.hidden, batch])
        return zeros

    def replace(self, runs: list[Forward]) -> None:
        """Make the loops' results Y, Y_h and Y_c instead of the node's."""
        ctx, op = self.ctx, self.op
        rows = []
        for index, run in enumerate(runs):
            # ONNX: Y is 0 behind a sequence's end, and Y_h and Y_c are the states at its end.
            states = run.states[0] if self.valid is None else op.Mul(run.states[0], self.valid)
            rows.append(op.Unsqueeze(self._flip(batch_first(op, states), index), [1]))
        y = self._join(rows, axis=1)
        # [time, directions, batch, hidden], or with layout 1 [batch, time, directions, hidden].
        values = [op.Transpose(y, perm=[2, 0, 1, 3]) if self.layout else y]
        for i in range(self.cell.states):
            ends = [run.final[i] for run in runs]
            if self.last is not None:
                ends = [op.ReduceSum(op.Mul(run.states[i], self.last), [0], keepdims=0) for run in runs]
            values.append(self._state(ends))
        for old, new in zip(ctx.outputs, values):
            if old.dtype is None:  # an output that the node leaves out
                old.dtype, old.shape = dtype_of(new), new.shape
        ctx.replace(*values[: len(ctx.outputs)])

    def cotangents(self, index: int) -> Cotangents:
        """The cotangents for one direction, in the order of its loop's steps."""
        op = self.op
        y, *ends = [*self.ctx.cotangents, None, None][: 1 + self.cell.states]
        if y is not None:
            y = op.Transpose(y, perm=[1, 2, 0, 3]) if self.layout else y
            y = batch_first(op, self._flip(self._pick(y, index, axis=1), index))
        final = [None if end is None else self._column(end, index) for end in ends]
        states = [y, *[None] * (self.cell.states - 1)]
        if self.valid is None or self.last is None:
            return Cotangents(states, final)
        # A sequence ends at some step of the loop: the cotangent of its final state is added at that step. The padding
        # behind it, through which the backward loop comes first, has cotangent 0.
        if y is not None:
            states[0] = op.Mul(y, self.valid)
        for i, end in enumerate(final):
            if end is not None:
                placed, given = op.Mul(end, self.last), states[i]
                states[i] = placed if given is None else op.Add(given, placed)
        return Cotangents(states, [None] * self.cell.states)

    def gradients(self, directions: list[Direction], backward: list[Backward]) -> Gradients:
        """The gradients of the node's inputs, in their order."""
        ctx, op = self.ctx, self.op
        sizes = [fixed_sizes(dims(d.w)) for d in directions]
        # dx = w^T dgates; dw = dgates x^T and dr = dgates h^T, one product each over all steps.
        flat = [d.columns(gradient.gates, size[0]) for d, gradient, size in zip(directions, backward, sizes)]
        grad_x = None
        if ctx.wants(0):
            # Both directions read x and add to its gradient; weights, biases and states are stacked by direction.
            to_x = [d.to_inputs(g.gates) if g.inputs is None else g.inputs for d, g in zip(directions, backward)]
            grad_x = reduce(op.Add, [self._flip(part, index) for index, part in enumerate(to_x)])
        grad_w = self._stack([op.MatMul(a, d.rows(d.x, size[1])) for d, a, size in zip(directions, flat, sizes)])
        grad_r = self._stack([self._join([op.MatMul(a, b) for a, b in g.recurrent]) for g in backward])
        grad_b = None
        if ctx.optional(3) is not None:
            # The bias of W, then that of R: the sums of what each product's gradient is, over steps and batch.
            parts = [[gates, *(a for a, _ in g.recurrent)] for gates, g in zip(flat, backward)]
            grad_b = self._stack([self._join([op.ReduceSum(a, [1], keepdims=0) for a in p]) for p in parts])
        initial = [self._state([g.initial[i] for g in backward]) for i in range(self.cell.states)]
        peepholes = [g.peepholes for g in backward if g.peepholes is not None]
        grad_p = [self._stack(peepholes)] if peepholes else []
        every = [None if grad_x is None else self._swap(grad_x), grad_w, grad_r, grad_b, None, *initial, *grad_p]
        # No gradient for an input that the node leaves out.
        return [gradient if ctx.optional(i) is not None else None for i, gradient in enumerate(every)]

    def _masks(self) -> tuple[ir.Value | None, ir.Value | None]:
        """Two masks [time, 1, batch]: 1 at every step of a sequence, and 1 at its last step; None without lengths."""
        if self.lengths is None:
            return None, None
        op, dtype = self.op, dtype_of(self.x)
        # ONNX counts sequence_lens in int32: step < length is inside, step + 1 = length is the last one.
        steps = op.Range(0, op.Squeeze(op.Shape(self.x, start=0, end=1), [0]), 1)
        step = op.Unsqueeze(op.Cast(steps, to=ir.DataType.INT32), [1, 2])
        step.shape = ir.Shape([dims(self.x)[0], 1, 1])
        last = op.Equal(op.Add(step, op.constant(1, ir.DataType.INT32)), self.lengths)
        return op.Cast(op.Less(step, self.lengths), to=dtype), op.Cast(last, to=dtype)

    def _flip(self, sequence: ir.Value, index: int) -> ir.Value:
        """[time, batch, n]; for the reverse direction with lengths each sequence reversed, before its padding."""
        if self.lengths is None or not self.reverse[index]:
            return sequence
        lengths = self.op.Cast(self.lengths, to=ir.DataType.INT64)
        return self.op.ReverseSequence(sequence, lengths, time_axis=0, batch_axis=1)

    def _swap(self, value: ir.Value) -> ir.Value:
        """Between the node's layout and [time or directions, batch, n]."""
        return self.op.Transpose(value, perm=[1, 0, 2]) if self.layout else value

    def _column(self, state: ir.Value, index: int) -> ir.Value:
        """A state of the node as [hidden, batch], for one direction."""
        return self.op.Transpose(self._pick(self._swap(state), index), perm=[1, 0])

    def _state(self, columns: Sequence[ir.Value]) -> ir.Value:
        """The reverse of `_column`, for all directions."""
        return self._swap(self._stack([self.op.Transpose(column, perm=[1, 0]) for column in columns]))

    def _halves(self, bias: ir.Value) -> tuple[ir.Value, ir.Value]:
        """B is the bias of W, followed by that of R."""
        first, second = self.op.emit("Split", bias, num_outputs=2, axis=0, outputs=2)
        return first, second

    def _pick(self, value: ir.Value, index: int, axis: int = 0) -> ir.Value:
        op = self.op
        return op.Squeeze(value, [axis]) if len(self.reverse) == 1 else op.Gather(value, index, axis=axis)

    def _stack(self, values: Sequence[ir.Value]) -> ir.Value:
        return self._join([self.op.Unsqueeze(value, [0]) for value in values])

    def _join(self, values: Sequence[ir.Value], axis: int = 0) -> ir.Value:
        return values[0] if len(values) == 1 else self.op.Concat(*values, axis=axis)


def clip_argument(op: Builder, a: ir.Value, clip: float | None) -> ir.Value:
    """The argument of an activation, limited to [-clip, clip]."""
    if clip is None:
        return a
    return op.Clip(a, op.constant(-clip, dtype_of(a)), op.constant(clip, dtype_of(a)))


def unclipped_mask(op: Builder, a: ir.Value, clip: float) -> ir.Value:
    """1 where `clip_argument` changes nothing, else 0: the derivative of the clipping."""
    return op.Cast(op.Less(op.Abs(a), float(clip)), to=dtype_of(a))


def batch_first(op: Builder, sequence: ir.Value) -> ir.Value:
    """[time, n, batch] <-> [time, batch, n]."""
    return op.Transpose(sequence, perm=[0, 2, 1])
