"""RNN (Elman 1990)."""

from __future__ import annotations

from dataclasses import dataclass

from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Gradients, rule
from archipel.autodiff.rules.recurrent import (
    Backward,
    Cotangents,
    Direction,
    Forward,
    Values,
    clip_argument,
    differentiate_layer,
    unclipped_mask,
)
from archipel.graph.build import Builder


@rule("", "RNN")
def rnn(ctx: RuleContext) -> Gradients:
    """X [time, batch, features] (ONNX RNN-14)."""
    return differentiate_layer(ctx, _Cell(ctx.attribute("clip", None)))


@dataclass
class _Cell:
    """h = tanh(w x + r before + bias)."""

    clip: float | None
    functions: tuple[str, ...] = ("Tanh",)
    states: int = 1

    def forward(self, d: Direction) -> Forward:
        def step(op: Builder, carried: Values, items: Values) -> tuple[Values, Values]:
            a = op.Gemm(d.r, carried[0], items[0])
            h = d.activations[0](op, clip_argument(op, a, self.clip))
            return [h], [h, *([] if self.clip is None else [a])]

        final, (h, *kept) = d.loop(step, d.initial, [d.project(*d.factors(d.bias()))])
        return Forward([h], final, kept)

    def backward(self, d: Direction, run: Forward, cotangents: Cotangents) -> Backward:
        """da = dh tanh'(a), with a the argument of tanh; dh of the step before = r^T da."""
        op, h = d.op, run.states[0]
        slope = d.activations[0].pull(op, h, op.full_like(h, 1.0))
        if self.clip is not None:
            slope = op.Mul(slope, unclipped_mask(op, run.kept[0], self.clip))
        weights = op.Transpose(d.r, perm=[1, 0])

        def step(op: Builder, carried: Values, items: Values) -> tuple[Values, Values]:
            (slope, *dy), (dh,) = items, carried
            gates = op.Mul(op.Add(dh, dy[0]) if dy else dh, slope)
            return [op.MatMul(weights, gates)], [gates]

        initial, (gates,) = d.loop(step, cotangents.start(d), [slope, *cotangents.given], gradient=True)
        return Backward(gates, [(d.columns(gates, d.hidden), d.previous(h))], initial)
