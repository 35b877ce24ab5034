"""LSTM (Hochreiter and Schmidhuber 1997; peepholes: Gers et al. 2002)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Gradients, rule
from archipel.autodiff.rules.recurrent import (
    Backward,
    Cotangents,
    Direction,
    Forward,
    Values,
    batch_first,
    clip_argument,
    differentiate_layer,
    unclipped_mask,
)
from archipel.autodiff.rules.recurrent_activation import named
from archipel.graph.build import Builder
from archipel.graph.outline import outline
from archipel.graph.shapes import dtype_of


@rule("", "LSTM")
def lstm(ctx: RuleContext) -> Gradients:
    """X [time, batch, features], gates in the order i o f c (ONNX LSTM-14)."""
    return differentiate_layer(ctx, _Cell(ctx.attribute("clip", None), bool(ctx.attribute("input_forget", 0))))


@dataclass
class _Cell:
    """i, o, f = sigma(.); g = tanh(.); c = f * before + i * g; h = o * tanh(c), each (.) being w x + r h + bias.

    Peepholes let i and f see c before the step, and o after it; with input_forget f is 1 - i.
    """

    clip: float | None
    input_forget: bool
    functions: tuple[str, ...] = ("Sigmoid", "Tanh", "Tanh")
    states: int = 2

    def forward(self, d: Direction) -> Forward:
        if not self._has_kernel(d):
            return self._forward(d, d.project(*d.factors(d.bias())))

        def body(op: Builder, x: ir.Value, w: ir.Value, r: ir.Value, *initial: ir.Value) -> Values:
            own = replace(d, op=op, r=r, initial=list(initial))
            run = self._forward(own, own.project(batch_first(op, x), w))
            return [*run.states, *run.final, *run.kept]

        x, w = d.factors(d.bias())
        x = batch_first(d.op, x)
        h, last_h, last_c, *kept = outline(d.op, "LSTM", [x, w, d.r, *d.initial], body, reverse=int(d.backwards))
        return Forward([h], [last_h, last_c], kept)

    def _has_kernel(self, d: Direction) -> bool:
        """Whether the loops are to be functions that the kernel pack has operators for."""
        return (
            d.op.outlined is not None
            and (self.clip is None and not self.input_forget and d.peepholes is None and not d.ragged)
            and d.activations == tuple(map(named, self.functions))
            and dtype_of(d.r) == ir.DataType.FLOAT
        )

    def _forward(self, d: Direction, a: ir.Value) -> Forward:
        """The loop over w x + bias."""
        sigma, tanh, squash = d.activations
        parts = [3 * d.hidden, d.hidden]
        peepholes = _peepholes(d)
        # c after each step is emitted only where something reads it: ends of ragged sequences, peepholes' gradients.
        keep = d.ragged or d.peepholes is not None

        def step(op: Builder, carried: Values, items: Values) -> tuple[Values, Values]:
            h, before = carried
            a = op.Gemm(d.r, h, items[0])
            a_iof, a_g = op.emit("Split", a, parts, axis=0, outputs=2)
            g = tanh(op, clip_argument(op, a_g, self.clip))
            if peepholes or self.input_forget:
                a_iof, i, o, f, c = self._separate_gates(op, d, a_iof, g, before, peepholes)
            else:
                iof = sigma(op, clip_argument(op, a_iof, self.clip))
                i, o, f = op.emit("Split", iof, num_outputs=3, axis=0, outputs=3)
                c = op.Add(op.Mul(f, before), op.Mul(i, g))
            squashed = squash(op, c)
            h = op.Mul(o, squashed)
            # The arguments of the activations only if they may be clipped: else y alone gives each derivative. The
            # gates one by one: cutting a sequence of all three copies it.
            kept = [i, o, f, g, squashed, before, *([] if self.clip is None else [a_iof, a_g])]
            return [h, c], [*([c] if keep else []), *kept]

        final, emitted = d.loop(step, d.initial, [a])
        cells, kept = (emitted[:1], emitted[1:]) if keep else ([], emitted)
        # h is not emitted: o tanh(c) as one product over all steps costs less than a copy of h out of each step.
        return Forward([d.op.Mul(kept[1], kept[4]), *cells], final, kept)

    def _separate_gates(
        self, op: Builder, d: Direction, a: ir.Value, g: ir.Value, before: ir.Value, peepholes: Values
    ) -> tuple[ir.Value, ...]:
        """The gates one by one, for peepholes and input_forget: their arguments, i, o (which may see c), f, and c."""
        sigma = d.activations[0]
        # Peepholes are in ONNX's order i, o, f, and multiply elementwise.
        a_i, a_o, a_f = op.emit("Split", a, num_outputs=3, axis=0, outputs=3)
        if peepholes:
            a_i, a_f = op.Add(a_i, op.Mul(peepholes[0], before)), op.Add(a_f, op.Mul(peepholes[2], before))
        i = sigma(op, clip_argument(op, a_i, self.clip))
        f = op.Sub(1.0, i) if self.input_forget else sigma(op, clip_argument(op, a_f, self.clip))
        c = op.Add(op.Mul(f, before), op.Mul(i, g))
        if peepholes:
            a_o = op.Add(a_o, op.Mul(peepholes[1], c))
        o = sigma(op, clip_argument(op, a_o, self.clip))
        return op.Concat(a_i, a_o, a_f, axis=0), i, o, f, c

    def backward(self, d: Direction, run: Forward, cotangents: Cotangents) -> Backward:
        start, inputs = cotangents.start(d), None
        if self._has_kernel(d):
            # Without columns the weights make a gradient of x without rows.
            w = d.w if d.wants_inputs else d.op.constant(np.zeros((4 * d.hidden, 0), np.float32))

            def body(op: Builder, *inputs: ir.Value) -> Values:
                kept, (r, w, dh, dc, *dy) = list(inputs[:6]), inputs[6:]
                given = Cotangents([dy[0] if dy else None, None], [dh, dc])
                gates, initial = self._backward(replace(d, op=op, r=r), Forward([], [], kept), given, [dh, dc])
                # A product for each step, as the kernel has it.
                return [gates, *initial, op.MatMul(op.Einsum(w, equation="gx->xg"), gates)]

            given = [*run.kept, d.r, w, *start, *cotangents.given]
            gates, *initial, inputs = outline(d.op, "LSTMGrad", given, body, reverse=int(d.backwards))
            inputs = batch_first(d.op, inputs)
        else:
            gates, initial = self._backward(d, run, cotangents, start)
        recurrent = [(d.columns(gates, 4 * d.hidden), d.previous(run.states[0]))]
        return Backward(gates, recurrent, initial, _peephole_gradient(d, run, gates), inputs)

    def _backward(self, d: Direction, run: Forward, cotangents: Cotangents, start: Values) -> tuple[ir.Value, Values]:
        """The gradients of w x + bias and of the initial states.

        With da the gradient of (.): dc += dh o tanh'(c); da = (dc g, dh tanh(c), dc before, dc i) times the slopes
        of the activations; dh of the step before = r^T da, its dc = f dc. The loop finds all factors computed.
        """
        factors = self._factors(d, run)
        # dy is the cotangent of h after each step; `ends` that of c, only where sequences end inside the loop.
        weights = d.op.Transpose(d.r, perm=[1, 0])
        dy, ends = cotangents.states

        def step(op: Builder, carried: Values, items: Values) -> tuple[Values, Values]:
            (dh, dc), (i, o, f, g, via_h, via_c, *rest) = carried, items
            if dy is not None:
                dh = op.Add(dh, rest[0])
            dc = op.Add(dc, op.Mul(dh, via_h))
            if ends is not None:
                dc = op.Add(dc, rest[-1])
            gates = op.Concat(op.Mul(dc, i), op.Mul(dh, o), op.Mul(dc, f), op.Mul(dc, g), axis=0)
            return [op.MatMul(weights, gates), op.Mul(dc, via_c)], [gates]

        initial, (gates,) = d.loop(step, start, [*factors, *cotangents.given], gradient=True)
        return gates, initial

    def _factors(self, d: Direction, run: Forward) -> Values:
        """Six factors for each step: of dc, dh, dc, dc for the gates' gradients, of dh for its part of dc, of dc for
        that of the step before."""
        op, (i, o, f, g, squashed, before, *a) = d.op, run.kept
        sigma, tanh, squash = d.activations
        # With input_forget c = (1 - i) before + i g: di = dc (g - before), and f has no gradient of its own.
        to_i = op.Sub(g, before) if self.input_forget else g
        slopes = [sigma.pull(op, i, to_i), sigma.pull(op, o, squashed)]
        slopes.append(op.full_like(g, 0.0) if self.input_forget else sigma.pull(op, f, before))
        slopes.append(tanh.pull(op, g, i))
        if self.clip is not None:
            masks = op.emit("Split", unclipped_mask(op, a[0], self.clip), num_outputs=3, axis=1, outputs=3)
            slopes = [op.Mul(*pair) for pair in zip(slopes, [*masks, unclipped_mask(op, a[1], self.clip)])]
        through_h, through_c = squash.pull(op, squashed, o), f
        # A peephole is one more way from c to a gate: to o at this step, to i and f from the step before.
        if d.peepholes is not None:
            p_i, p_o, p_f = _peepholes(d)
            through_h = op.Add(through_h, op.Mul(slopes[1], p_o))
            through_c = op.Add(op.Add(f, op.Mul(slopes[0], p_i)), op.Mul(slopes[2], p_f))
        return [*slopes, through_h, through_c]


def _peepholes(d: Direction) -> Values:
    if d.peepholes is None:
        return []
    return list(d.op.emit("Split", d.op.Unsqueeze(d.peepholes, [1]), num_outputs=3, axis=0, outputs=3))


def _peephole_gradient(d: Direction, run: Forward, gates: ir.Value) -> ir.Value | None:
    if d.peepholes is None:
        return None
    # Each weight gets the gradients of its gate times the c that the gate saw, summed over steps and batch.
    op, before, after = d.op, run.kept[5], run.states[1]
    seen = op.Concat(before, after, before, axis=1)
    return op.ReduceSum(op.Mul(seen, op.Slice(gates, [0], [3 * d.hidden], [1])), [0, 2], keepdims=0)
