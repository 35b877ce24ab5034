"""Activation functions: dx = g f'(x), with g the cotangent of y = f(x). The formulas below are f'(x), at kinks that of
PyTorch, and written with y where possible, which is there already."""

from __future__ import annotations

import math

import onnx_ir as ir

from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Gradients, rule
from archipel.graph.build import Builder
from archipel.graph.outline import outline
from archipel.graph.shapes import dtype_of


@rule("", "Relu")
def relu(ctx: RuleContext) -> Gradients:
    """1 where x > 0, else 0, also at 0."""

    def body(op: Builder, g: ir.Value, y: ir.Value) -> list[ir.Value]:
        # y is 0 exactly where the derivative is, so x need not be kept in memory for this.
        # Float -> bool -> float is the fastest 0/1 mask on ONNX Runtime: faster than Sign, much faster than Where.
        return [op.Mul(g, op.Cast(op.Cast(y, to=int(ir.DataType.BOOL)), to=int(dtype_of(y))))]

    inputs = [ctx.cotangent, ctx.output]
    is_native = dtype_of(ctx.output) == ir.DataType.FLOAT
    return outline(ctx.op, "ReluGrad", inputs, body) if is_native else body(ctx.op, *inputs)


@rule("", "LeakyRelu")
def leaky_relu(ctx: RuleContext) -> Gradients:
    """1 where x > 0, else alpha, also at 0."""
    return [ctx.op.Mul(ctx.cotangent, _step(ctx.op, ctx.input(0), ctx.attribute("alpha", 0.01), 1.0))]


@rule("", "ThresholdedRelu")
def thresholded_relu(ctx: RuleContext) -> Gradients:
    """1 where x > alpha, else 0, also at alpha."""
    op, x = ctx.op, ctx.input(0)
    return [op.Mul(ctx.cotangent, _positive(op, op.Sub(x, ctx.attribute("alpha", 1.0))))]


@rule("", "Shrink")
def shrink(ctx: RuleContext) -> Gradients:
    """1 where |x| > lambd, else 0."""
    op, x = ctx.op, ctx.input(0)
    return [op.Mul(ctx.cotangent, _positive(op, op.Sub(op.Abs(x), ctx.attribute("lambd", 0.5))))]


@rule("", "PRelu")
def prelu(ctx: RuleContext) -> Gradients:
    """dx = g (1 where x > 0, else the slope, also at 0); dslope = g min(x, 0)."""
    op, g, x, slope = ctx.op, ctx.cotangent, ctx.input(0), ctx.input(1)
    grad_x = grad_slope = None
    if ctx.wants(0):
        # p + (1 - p) slope with p = [x > 0], written so that the subtraction is over the few slopes only.
        grad_x = op.Mul(g, op.Add(op.Mul(_positive(op, x), op.Sub(1.0, slope)), slope))
    if ctx.wants(1):
        grad_slope = op.sum_to(op.Mul(g, _negative_part(op, x)), slope)
    return [grad_x, grad_slope]


@rule("", "Elu")
def elu(ctx: RuleContext) -> Gradients:
    """y = alpha (exp x - 1) where x <= 0: 1 where x > 0, else alpha exp x; alpha at 0."""
    op, x, alpha = ctx.op, ctx.input(0), ctx.attribute("alpha", 1.0)
    slope = op.Exp(_negative_part(op, x))  # exp 0 = 1 where x is positive; exp x alone could overflow there
    return [op.Mul(ctx.cotangent, slope if alpha == 1.0 else op.Mul(slope, _step(op, x, alpha, 1.0)))]


@rule("", "Selu")
def selu(ctx: RuleContext) -> Gradients:
    """gamma where x > 0, else gamma alpha exp x (Klambauer et al. 2017); gamma alpha at 0."""
    op, x = ctx.op, ctx.input(0)
    alpha, gamma = ctx.attribute("alpha", 1.67326319217681884765625), ctx.attribute("gamma", 1.05070102214813232421875)
    slope = op.Mul(op.Exp(_negative_part(op, x)), _step(op, x, alpha * gamma, gamma))
    return [op.Mul(ctx.cotangent, slope)]


@rule("", "Celu")
def celu(ctx: RuleContext) -> Gradients:
    """exp(min(x, 0) / alpha) (Barron 2017): 1 where x >= 0."""
    op, x = ctx.op, ctx.input(0)
    return [op.Mul(ctx.cotangent, op.Exp(op.Div(_negative_part(op, x), ctx.attribute("alpha", 1.0))))]


@rule("", "Sigmoid")
def sigmoid(ctx: RuleContext) -> Gradients:
    """y (1 - y)."""
    op, y = ctx.op, ctx.output
    return [op.Mul(ctx.cotangent, op.Sub(y, op.Mul(y, y)))]


@rule("", "Tanh")
def tanh(ctx: RuleContext) -> Gradients:
    """1 - y^2."""
    op, y = ctx.op, ctx.output
    return [op.Mul(ctx.cotangent, op.Sub(1.0, op.Mul(y, y)))]


@rule("", "Softplus")
def softplus(ctx: RuleContext) -> Gradients:
    """y = log(1 + exp x): sigmoid x."""
    return [ctx.op.Mul(ctx.cotangent, ctx.op.Sigmoid(ctx.input(0)))]


@rule("", "Softsign")
def softsign(ctx: RuleContext) -> Gradients:
    """(1 - |y|)^2 = 1 / (1 + |x|)^2."""
    op = ctx.op
    rest = op.Sub(1.0, op.Abs(ctx.output))
    return [op.Mul(ctx.cotangent, op.Mul(rest, rest))]


@rule("", "Mish")
def mish(ctx: RuleContext) -> Gradients:
    """With t = tanh(softplus(x)) and y = x t: t + x (1 - t^2) sigmoid(x) = t + (x - y t) sigmoid(x)."""
    op, x = ctx.op, ctx.input(0)
    t = op.Tanh(op.Softplus(x))
    slope = op.Add(t, op.Mul(op.Sub(x, op.Mul(ctx.output, t)), op.Sigmoid(x)))
    return [op.Mul(ctx.cotangent, slope)]


@rule("", "Gelu")
def gelu(ctx: RuleContext) -> Gradients:
    """y = x P(x): P(x) + x P'(x), with P the distribution function of the standard normal or its approximation by tanh
    (Hendrycks and Gimpel 2016)."""
    op, x = ctx.op, ctx.input(0)
    slope = _gelu_tanh(op, x, ctx.output) if ctx.attribute("approximate", "none") == "tanh" else _gelu_erf(op, x)
    return [op.Mul(ctx.cotangent, slope)]


def _gelu_erf(op: Builder, x: ir.Value) -> ir.Value:
    """(1 + erf(x / sqrt 2)) / 2 + x exp(-x^2 / 2) / sqrt(2 pi), in as few passes over memory as operators allow.

    With s = x / sqrt 2 the last term is s exp(-s^2 - log sqrt pi). It comes first, which takes less memory: only s and
    this term are kept while the other one is computed.
    """
    scaled = op.Mul(x, math.sqrt(0.5))
    bell = op.Mul(scaled, op.Exp(op.Sub(-0.5 * math.log(math.pi), op.Mul(scaled, scaled))))
    erf = op.Erf(scaled)
    if dtype_of(x) == ir.DataType.FLOAT:
        below = op.HardSigmoid(erf, alpha=0.5, beta=0.5)  # (1 + erf) / 2 at once: what it clips is rounding
    else:  # ONNX Runtime's HardSigmoid is float32 only
        below = op.Mul(op.Add(erf, 1.0), 0.5)
    return op.Add(below, bell)


def _gelu_tanh(op: Builder, x: ir.Value, y: ir.Value) -> ir.Value:
    """(1 + tanh u) / 2 = sigmoid(2 u) = p with 2 u = a x + b x^3, so the derivative is p + y (1 - p) (a + 3 b x^2)."""
    a = math.sqrt(8 / math.pi)
    b = a * 0.044715
    square = op.Mul(x, x)
    p = op.Sigmoid(op.Mul(x, op.Add(op.Mul(square, b), a)))
    return op.Add(p, op.Mul(op.Mul(y, op.Sub(1.0, p)), op.Add(op.Mul(square, 3 * b), a)))


@rule("", "HardSigmoid")
def hard_sigmoid(ctx: RuleContext) -> Gradients:
    """y = max(0, min(1, alpha x + beta)): alpha where 0 < y < 1, else 0, also at both kinks."""
    op, y = ctx.op, ctx.output
    inside = op.Cast(op.And(op.Greater(y, 0.0), op.Less(y, 1.0)), to=int(dtype_of(y)))
    return [op.Mul(ctx.cotangent, op.Mul(inside, ctx.attribute("alpha", 0.2)))]


@rule("", "HardSwish")
def hard_swish(ctx: RuleContext) -> Gradients:
    """y = x h(x), h the HardSigmoid with alpha = 1/6, beta = 1/2: h(x) + x h'(x), with h' = 0 at both kinks: 0 at -3,
    1 at 3."""
    op, x = ctx.op, ctx.input(0)
    inside = op.Cast(op.Less(op.Abs(x), 3.0), to=int(dtype_of(x)))
    slope = op.Add(op.HardSigmoid(x, alpha=1 / 6, beta=0.5), op.Mul(op.Mul(x, inside), 1 / 6))
    return [op.Mul(ctx.cotangent, slope)]


def _positive(op: Builder, x: ir.Value) -> ir.Value:
    """1 where x > 0, else 0."""
    return op.Cast(op.Greater(x, 0.0), to=int(dtype_of(x)))


def _negative_part(op: Builder, x: ir.Value) -> ir.Value:
    return op.Clip(x, None, 0.0)


def _step(op: Builder, x: ir.Value, below: float, above: float) -> ir.Value:
    """`above` where x > 0, else `below`."""
    mask = _positive(op, x)
    # The usual case takes one node after the mask instead of two: Clip lifts 0 to `below` and leaves 1.
    if above == 1.0 and 0.0 <= below <= 1.0:
        return op.Clip(mask, below, 1.0)
    return op.Add(op.Mul(mask, above - below), below)
