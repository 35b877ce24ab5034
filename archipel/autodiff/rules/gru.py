"""GRU (Cho et al. 2014)."""

from __future__ import annotations

from dataclasses import dataclass

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
from archipel.graph.build import Builder


@rule("", "GRU")
def gru(ctx: RuleContext) -> Gradients:
    """X [time, batch, features], gates in the order z r h (ONNX GRU-14)."""
    return differentiate_layer(ctx, _Cell(ctx.attribute("clip", None), bool(ctx.attribute("linear_before_reset", 0))))


@dataclass
class _Cell:
    """z, r = sigma(.); h = (1 - z) * n + z * before, each (.) being w x + R before + bias.

    n = tanh(w x + r * (R before + bias) + bias) with linear_before_reset, else tanh(w x + R (r * before) + bias).
    """

    clip: float | None
    linear_before_reset: bool
    functions: tuple[str, ...] = ("Sigmoid", "Tanh")
    states: int = 1

    def forward(self, d: Direction) -> Forward:
        op, hidden = d.op, d.hidden
        sigma, tanh = d.activations
        gates, new = op.emit("Split", d.r, [2 * hidden, hidden], axis=0, outputs=2)
        bias = inner = None
        # All biases are added to w x outside of the loop, but that of n in R: with linear_before_reset r multiplies it.
        if d.biases is not None:
            outside, recurrent = d.biases
            if self.linear_before_reset:
                of_gates, of_new = op.emit("Split", recurrent, [2 * hidden, hidden], axis=0, outputs=2)
                inner = op.Unsqueeze(of_new, [1])  # the addend of R before, inside the loop
                recurrent = op.Pad(of_gates, [0, hidden])
            bias = op.Add(outside, recurrent)
        inputs = op.emit("Split", d.project(*d.factors(bias)), [2 * hidden, hidden], axis=1, outputs=2)

        def step(op: Builder, carried: Values, items: Values) -> tuple[Values, Values]:
            (h,), (x_gates, x_new) = carried, items
            a_gates = op.Gemm(gates, h, x_gates)
            zr = sigma(op, clip_argument(op, a_gates, self.clip))
            z, r = op.emit("Split", zr, num_outputs=2, axis=0, outputs=2)
            if self.linear_before_reset:
                reset = op.Gemm(new, h, inner)
                a_new = op.Add(x_new, op.Mul(r, reset))
            else:
                reset = op.Mul(r, h)
                a_new = op.Gemm(new, reset, x_new)
            n = tanh(op, clip_argument(op, a_new, self.clip))
            change = op.Sub(h, n)  # h = n + z (before - n); the gradient of z needs it as well
            h = op.Add(n, op.Mul(z, change))
            # `reset` is R before + bias, a factor of dr, or r * before, a factor of the gradient of R.
            return [h], [h, zr, n, change, reset, *([] if self.clip is None else [a_gates, a_new])]

        final, (h, *kept) = d.loop(step, d.initial, inputs)
        return Forward([h], final, kept)

    def backward(self, d: Direction, run: Forward, cotangents: Cotangents) -> Backward:
        op, (zr, n, change, reset, *a) = d.op, run.kept
        sigma, tanh = d.activations
        # dz = dh (before - n), dn = dh (1 - z), each times the slope of its activation. r multiplied `read`.
        z, r = op.emit("Split", zr, num_outputs=2, axis=1, outputs=2)
        read = reset if self.linear_before_reset else op.Add(change, n)
        slopes = sigma.pull(op, zr, op.Concat(change, read, axis=1))
        to_n = tanh.pull(op, n, op.Sub(op.full_like(z, 1.0), z))
        if self.clip is not None:
            slopes = op.Mul(slopes, unclipped_mask(op, a[0], self.clip))
            to_n = op.Mul(to_n, unclipped_mask(op, a[1], self.clip))
        # What r multiplies decides whether its gradient needs a product inside the loop.
        through = self._through_product if self.linear_before_reset else self._through_reset
        return through(d, run, cotangents, slopes, to_n, z, r)

    def _through_product(
        self,
        d: Direction,
        run: Forward,
        cotangents: Cotangents,
        slopes: ir.Value,
        to_n: ir.Value,
        z: ir.Value,
        r: ir.Value,
    ) -> Backward:
        """n = tanh(w x + r * (R before + bias)): each gate's gradient is dh times a factor known before the loop."""
        op = d.op
        to_z, to_r = op.emit("Split", slopes, num_outputs=2, axis=1, outputs=2)
        slopes = op.Concat(to_z, op.Mul(to_n, to_r), op.Mul(to_n, r), axis=1)
        weights = op.Transpose(d.r, perm=[1, 0])

        def step(op: Builder, carried: Values, items: Values) -> tuple[Values, Values]:
            (slope, keep, *dy), (dh,) = items, carried
            dh = op.Add(dh, dy[0]) if dy else dh
            # h reaches the step before through R (all three gates) and directly, times z, which is `keep`.
            gates = op.Mul(op.Concat(dh, dh, dh, axis=0), slope)
            return [op.Gemm(weights, gates, op.Mul(dh, keep))], [gates, dh]

        initial, (inside, dh) = d.loop(step, cotangents.start(d), [slopes, z, *cotangents.given], gradient=True)
        # Inside the loop the third part is the gradient of R before + bias; that of w x lacks the factor r.
        gates = op.Concat(op.Slice(inside, [0], [2 * d.hidden], [1]), op.Mul(dh, to_n), axis=1)
        return Backward(gates, [(d.columns(inside, 3 * d.hidden), d.previous(run.states[0]))], initial)

    def _through_reset(
        self,
        d: Direction,
        run: Forward,
        cotangents: Cotangents,
        slopes: ir.Value,
        to_n: ir.Value,
        z: ir.Value,
        r: ir.Value,
    ) -> Backward:
        """n = tanh(w x + R (r * before)): dr = before R^T dn needs a product inside the loop."""
        op = d.op
        flipped = op.Transpose(d.r, perm=[1, 0])
        gate_weights, new_weights = op.emit("Split", flipped, [2 * d.hidden, d.hidden], axis=1, outputs=2)

        def step(op: Builder, carried: Values, items: Values) -> tuple[Values, Values]:
            (slope, slope_n, keep, part, *dy), (dh,) = items, carried
            dh = op.Add(dh, dy[0]) if dy else dh
            # d(r * before) = R^T dn; from there to r, times before, and to before, times r, which is `part`.
            new = op.Mul(dh, slope_n)
            reset = op.MatMul(new_weights, new)
            gates = op.Mul(op.Concat(dh, reset, axis=0), slope)
            direct = op.Add(op.Mul(dh, keep), op.Mul(reset, part))
            return [op.Gemm(gate_weights, gates, direct)], [gates, new]

        initial, (gates, new) = d.loop(
            step, cotangents.start(d), [slopes, to_n, z, r, *cotangents.given], gradient=True
        )
        # R is two matrices here: that of the gates multiplied h before, that of n multiplied r * before.
        reset = d.rows(batch_first(op, run.kept[3]), d.hidden)
        recurrent = [(d.columns(gates, 2 * d.hidden), d.previous(run.states[0])), (d.columns(new, d.hidden), reset)]
        return Backward(op.Concat(gates, new, axis=1), recurrent, initial)
