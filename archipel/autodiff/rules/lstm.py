"""LSTM."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Gradients, rule
from archipel.autodiff.rules.recurrent import Backward, Cotangents, Direction, Forward, differentiate_layer
from archipel.graph.build import Builder

Values = list[ir.Value]


@rule("", "LSTM")
def lstm(ctx: RuleContext) -> Gradients:
    """X [time, batch, features], gates in the order i o f c (ONNX LSTM-14)."""
    return differentiate_layer(ctx, _Cell(ctx.attribute("clip", None), bool(ctx.attribute("input_forget", 0))))


@dataclass
class _Cell:
    """i, o, f = sigma(.); g = tanh(.); c = f * before + i * g; h = o * tanh(c)."""

    clip: float | None
    input_forget: bool
    functions: tuple[str, ...] = ("Sigmoid", "Tanh", "Tanh")
    states: int = 2

    def forward(self, d: Direction) -> Forward:
        sigma, tanh, squash = d.activations
        hidden = d.hidden

        def step(op: Builder, carried: Values, items: Values) -> tuple[Values, Values]:
            h, c = carried
            a = op.Gemm(d.r, h, items[0])
            gates, a_g = op.Split(a, [3 * hidden, hidden], axis=0, _outputs=2)
            g = tanh(op, self._clip(op, a_g))
            if d.peepholes is None and not self.input_forget:
                iof = sigma(op, self._clip(op, gates))
                i, o, f = op.Split(iof, num_outputs=3, axis=0, _outputs=3)
                after = op.Add(op.Mul(f, c), op.Mul(i, g))
            else:
                a_i, a_o, a_f = op.Split(gates, num_outputs=3, axis=0, _outputs=3)
                if d.peepholes is not None:
                    p_i, p_o, p_f = self._peepholes(op, d)
                    a_i, a_f = op.Add(a_i, op.Mul(p_i, c)), op.Add(a_f, op.Mul(p_f, c))
                i = sigma(op, self._clip(op, a_i))
                f = op.Sub(1.0, i) if self.input_forget else sigma(op, self._clip(op, a_f))
                after = op.Add(op.Mul(f, c), op.Mul(i, g))
                if d.peepholes is not None:
                    a_o = op.Add(a_o, op.Mul(p_o, after))
                o = sigma(op, self._clip(op, a_o))
                iof = op.Concat(i, o, f, axis=0)
                if self.clip is not None:
                    a = op.Concat(a_i, a_o, a_f, a_g, axis=0)
            squashed = squash(op, after)
            h = op.Mul(o, squashed)
            return [h, after], [h, after, iof, g, squashed, c, *([] if self.clip is None else [a])]

        final, (h, c, *kept) = d.loop(step, d.initial, [d.project(_total(d))])
        return Forward([h, c], final, kept)

    def backward(self, d: Direction, run: Forward, cotangents: Cotangents) -> Backward:
        op = d.op
        slopes, through_h, through_c = self._factors(d, run)
        weights = op.Transpose(d.r, perm=[1, 0])
        given = [value for value in cotangents.states if value is not None]

        def step(op: Builder, carried: Values, items: Values) -> tuple[Values, Values]:
            (dh, dc), (slope, via_h, via_c, *rest) = carried, items
            if cotangents.states[0] is not None:
                dh = op.Add(dh, rest[0])
            dc = op.Add(dc, op.Mul(dh, via_h))
            if cotangents.states[1] is not None:
                dc = op.Add(dc, rest[-1])
            gates = op.Mul(op.Concat(dc, dh, dc, dc, axis=0), slope)
            return [op.MatMul(weights, gates), op.Mul(dc, via_c)], [gates]

        start = [d.zeros() if value is None else value for value in cotangents.final]
        initial, (gates,) = d.loop(step, start, [slopes, through_h, through_c, *given], gradient=True)
        flat = d.columns(gates)
        return Backward(gates, [(flat, d.previous(run.states[0]))], initial, self._peephole_gradient(d, run, gates))

    def _factors(self, d: Direction, run: Forward) -> tuple[ir.Value, ir.Value, ir.Value]:
        """What a step multiplies: (dc, dh, dc, dc) to get the gates' gradients, dh to add to dc, dc to pass it on."""
        op, (iof, g, squashed, before, *a) = d.op, run.kept
        sigma, tanh, squash = d.activations
        slope, slope_g = sigma.derivative(op, iof), tanh.derivative(op, g)
        if self.clip is not None:
            inside = op.Cast(op.Less(op.Abs(a[0]), float(self.clip)), to=g.dtype)
            inner, inner_g = op.Split(inside, [3 * d.hidden, d.hidden], axis=1, _outputs=2)
            slope, slope_g = op.Mul(slope, inner), op.Mul(slope_g, inner_g)
        i, o, f = op.Split(iof, num_outputs=3, axis=1, _outputs=3)
        to_i, to_f = (op.Sub(g, before), op.full_like(g, 0.0)) if self.input_forget else (g, before)
        slopes = op.Mul(op.Concat(to_i, squashed, to_f, axis=1), slope)
        through_h, through_c = op.Mul(o, squash.derivative(op, squashed)), f
        if d.peepholes is not None:
            p_i, p_o, p_f = self._peepholes(op, d)
            s_i, s_o, s_f = op.Split(slopes, num_outputs=3, axis=1, _outputs=3)
            through_h = op.Add(through_h, op.Mul(s_o, p_o))
            through_c = op.Add(op.Add(f, op.Mul(s_i, p_i)), op.Mul(s_f, p_f))
        return op.Concat(slopes, op.Mul(i, slope_g), axis=1), through_h, through_c

    def _peephole_gradient(self, d: Direction, run: Forward, gates: ir.Value) -> ir.Value | None:
        if d.peepholes is None:
            return None
        op, before, after = d.op, run.kept[3], run.states[1]
        seen = op.Concat(before, after, before, axis=1)
        three = op.Slice(gates, [0], [3 * d.hidden], [1])
        total: ir.Value = op.ReduceSum(op.Mul(seen, three), [0, 2], keepdims=0)
        return total

    def _clip(self, op: Builder, a: ir.Value) -> ir.Value:
        return a if self.clip is None else op.Clip(a, op.constant(-self.clip, a.dtype), op.constant(self.clip, a.dtype))

    def _peepholes(self, op: Builder, d: Direction) -> tuple[ir.Value, ir.Value, ir.Value]:
        # Captured from outside, so that a loop does not split them at every step.
        i, o, f = d.op.Split(d.op.Unsqueeze(d.peepholes, [1]), num_outputs=3, axis=0, _outputs=3)
        return i, o, f


def _total(d: Direction) -> ir.Value | None:
    return None if d.biases is None else d.op.Add(*d.biases)
