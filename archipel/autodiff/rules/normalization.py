"""BatchNormalization, and what the other normalizations share with it.

In inference mode the operator is one pass over the data, `scale * (v - mean) / sqrt(var + epsilon) + shift` for each
channel, and ONNX Runtime has no faster way to scale and shift channels. So the gradients are written with it, too.

Source of the formulas: Ioffe and Szegedy 2015, section 3. Below, deviation = sqrt(var + epsilon), X^ = (X - mean) /
deviation, and g is the cotangent of Y = scale X^ + B.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from archipel.autodiff.context import ForwardContext, RuleContext
from archipel.autodiff.registry import Gradients, Tangents, forward_rule, rule
from archipel.graph.build import Builder
from archipel.graph.outline import outline
from archipel.graph.shapes import dims, dtype_of, is_static, rank, static_size

EPSILON = float(np.float32(1e-5))
"""ONNX's default; attributes are float32."""
HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
"""Types of 16 bits: their statistics are computed in the larger type that stash_type names."""
_MOMENTUM = float(np.float32(0.9))


@dataclass(frozen=True)
class Statistics:
    """Mean and (biased) variance of each channel, [channels]."""

    mean: ir.Value
    var: ir.Value
    epsilon: float


@rule("", "BatchNormalization")
def batch_normalization(ctx: RuleContext) -> Gradients:
    """X [batch, channels, *spatial], or [batch] of one channel; scale, B, mean, var [channels]
    (ONNX BatchNormalization-15)."""
    types = {dtype_of(ctx.input(i)) for i in range(5)}
    if len(types) > 1:
        ctx.refuse("inputs", f"X, scale and statistics have types {sorted(map(str, types))}; cast them to one")
    return _training(ctx) if ctx.attribute("training_mode", 0) else _inference(ctx)


def _inference(ctx: RuleContext) -> Gradients:
    """Mean and variance are inputs: every gradient is a sum over the channel.

    dX = scale g / deviation, dB = sum g, dscale = sum(g X^) = (sum(g X) - mean sum g) / deviation, dmean = -scale dB /
    deviation, dvar = -scale dscale / (2 (var + epsilon)).
    """
    op, scale, mean, var = ctx.op, ctx.input(1), ctx.input(3), ctx.input(4)
    epsilon = ctx.attribute("epsilon", EPSILON)
    x, g = _channels_second(op, ctx.input(0)), _channels_second(op, ctx.cotangent)
    spread = Statistics(fill(op, mean, 0.0), var, epsilon)
    grad_bias = _over_channels(op, op.ReduceSum, g)
    product = _over_channels(op, op.ReduceSum, op.Mul(g, x))
    # (product - mean grad_bias) / deviation, as a `standardize` of that row with mean * grad_bias for the mean.
    grad_scale = _standardize_row(op, product, Statistics(op.Mul(mean, grad_bias), var, epsilon))
    grad_mean = op.Neg(_standardize_row(op, grad_bias, spread, scale))
    grad_var = op.Mul(op.Div(op.Mul(scale, grad_scale), op.Add(var, epsilon)), -0.5)
    grad_x = op.reshape_like(standardize(op, g, spread, scale), ctx.input(0))
    return [grad_x, grad_scale, grad_bias, grad_mean, grad_var]


def _training(ctx: RuleContext) -> Gradients:
    """Mean and variance depend on X; the cotangents of the running statistics count as well."""
    op, x, scale = ctx.op, ctx.input(0), ctx.input(1)
    epsilon, momentum = ctx.attribute("epsilon", EPSILON), ctx.attribute("momentum", _MOMENTUM)
    with op.after(ctx.node):
        y, batch = normalize_batch(op, x, scale, ctx.input(2), epsilon)
        running = [
            op.Add(op.Mul(before, momentum), op.Mul(now, 1.0 - momentum))
            for before, now in ((ctx.input(3), batch.mean), (ctx.input(4), batch.var))
        ]
    ctx.replace(*[y, *running][: len(ctx.outputs)])
    g, to_mean, to_var = (*ctx.cotangents, None, None)[:3]
    flat = _channels_second(op, x)
    count = count_elements_per(op, batch.mean, x)
    # An output that nothing depends on leaves zeros.
    grad_x = None
    grad_scale = grad_bias = fill(op, scale, 0.0)
    if g is not None:
        grad_x, per_scale, per_bias = backward(op, flat, _channels_second(op, g), batch, scale)
        grad_scale, grad_bias = op.Mul(per_scale, count), op.Mul(per_bias, count)
    if to_mean is not None or to_var is not None:
        # d mean / dX = 1 / n and d var / dX = 2 (X - mean) / n, each times 1 - momentum: affine in X for each channel,
        # so one more `standardize`. Its slope is for X^, hence the deviation.
        share = op.Div(op.constant(1.0 - momentum, dtype_of(x)), count)
        slope, shift = fill(op, batch.mean, 0.0), None if to_mean is None else op.Mul(to_mean, share)
        if to_var is not None:
            slope = op.Mul(op.Mul(to_var, share), op.Mul(op.Sqrt(op.Add(batch.var, epsilon)), 2.0))
        statistics = standardize(op, flat, batch, slope, shift)
        grad_x = statistics if grad_x is None else op.Add(grad_x, statistics)
    return [
        None if grad_x is None else op.reshape_like(grad_x, x),
        grad_scale,
        grad_bias,
        *(fill(op, scale, 0.0) if to is None else op.Mul(to, momentum) for to in (to_mean, to_var)),
    ]


@forward_rule("", "BatchNormalization")
def push_batch_normalization(ctx: ForwardContext) -> Tangents:
    """dY = scale dX^ + dscale X^ + dB. In inference mode X^ moves with X, mean and var, each linear in its tangent but
    for var, whose share is -X^ dvar / (2 (var + epsilon)); in training mode with X as in the gradient, for the Jacobian
    of X -> X^ is symmetric."""
    op, scale, epsilon = ctx.op, ctx.input(1), ctx.attribute("epsilon", EPSILON)
    x, training = _channels_second(op, ctx.input(0)), ctx.attribute("training_mode", 0)
    moved, slope, shift = ctx.tangent(0), ctx.tangent(1), ctx.tangent(2)
    moved = None if moved is None else _channels_second(op, moved)
    parts: list[ir.Value] = []
    running: list[ir.Value | None] = []
    if training:
        with op.after(ctx.node):
            _, by = normalize_batch(op, x, scale, ctx.input(2), epsilon)
        if moved is not None:
            parts.append(backward(op, x, moved, by, scale)[0])
        running = _push_running(ctx, x, moved, by)
    else:
        by = Statistics(ctx.input(3), ctx.input(4), epsilon)
        still = Statistics(fill(op, by.mean, 0.0), by.var, epsilon)
        if moved is not None:
            parts.append(standardize(op, moved, still, scale))
        to_mean, to_var = ctx.tangent(3), ctx.tangent(4)
        if to_mean is not None:
            away = op.Neg(_standardize_row(op, to_mean, still, scale))
            shift = away if shift is None else op.Add(shift, away)
        if to_var is not None:
            away = op.Mul(op.Div(op.Mul(scale, to_var), op.Add(by.var, epsilon)), -0.5)
            slope = away if slope is None else op.Add(slope, away)
    if slope is not None or shift is not None:
        parts.append(standardize(op, x, by, fill(op, scale, 0.0) if slope is None else slope, shift))
    total = parts[0] if len(parts) == 1 else op.Add(*parts) if parts else None
    return [None if total is None else op.reshape_like(total, ctx.input(0)), *running][: len(ctx.outputs)]


def _push_running(ctx: ForwardContext, x: ir.Value, moved: ir.Value | None, batch: Statistics) -> list[ir.Value | None]:
    """Tangents of the running statistics: momentum times that before, and the rest of d mean = mean dX and
    d var = 2 mean(dX (X - mean))."""
    op, momentum = ctx.op, ctx.attribute("momentum", _MOMENTUM)
    of_batch: list[ir.Value | None] = [None, None]
    if moved is not None:
        shift = _over_channels(op, op.ReduceMean, moved)
        product = op.Sub(_over_channels(op, op.ReduceMean, op.Mul(moved, x)), op.Mul(batch.mean, shift))
        of_batch = [shift, op.Mul(product, 2.0)]
    results: list[ir.Value | None] = []
    for before, now in zip((ctx.tangent(3), ctx.tangent(4)), of_batch):
        terms = [op.Mul(v, share) for v, share in ((before, momentum), (now, 1.0 - momentum)) if v is not None]
        results.append(op.Add(*terms) if len(terms) == 2 else terms[0] if terms else None)
    return results


def normalize_batch(
    op: Builder, x: ir.Value, scale: ir.Value, bias: ir.Value, epsilon: float
) -> tuple[ir.Value, Statistics]:
    """Normalize the channels of `x` with their own statistics. Returns the result and the statistics.

    With momentum 0 the operator's new running statistics are those of the batch, so nothing is computed twice. It needs
    old ones as inputs, whose content does not matter; but ONNX Runtime overwrites their memory with the new ones, even
    that of weights and constants which others read. So each node gets inputs of its own that every run computes anew.
    """
    # A division by a size that is read at run time makes them no constants; a number of their own (that of the nodes so
    # far) keeps `share_subexpressions` from making one value of two nodes' inputs.
    own = len(op.graph)

    def body(op: Builder, x: ir.Value, scale: ir.Value, bias: ir.Value) -> tuple[ir.Value, ...]:
        size = op.Cast(op.Size(x), to=int(dtype_of(scale)))
        before = [op.Div(fill(op, scale, own + part), size) for part in (0.0, 0.5)]
        y, mean, var = op.emit(
            "BatchNormalization", x, scale, bias, *before, training_mode=1, momentum=0.0, epsilon=epsilon, outputs=3
        )
        mean.shape = var.shape = scale.shape
        return y, mean, var

    if not _has_kernel(x, scale):
        y, mean, var = body(op, x, scale, bias)
    else:
        y, mean, var = outline(op, "BatchNorm", [x, scale, bias], body, epsilon=epsilon, number=own)
    return y, Statistics(mean, var, epsilon)


def _has_kernel(x: ir.Value, scale: ir.Value) -> bool:
    """Whether the kernel pack normalizes `x`."""
    return dtype_of(x) == dtype_of(scale) == ir.DataType.FLOAT and rank(x) > 1


def backward(
    op: Builder, x: ir.Value, g: ir.Value, batch: Statistics, scale: ir.Value
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """The adjoint of `normalize_batch`: gradient of x, and those of scale and bias over n, the elements of a channel.

    dX = scale / deviation (g - mean(g X^) X^ - mean g); dscale / n = mean(g X^), dB / n = mean g.
    """

    def body(
        op: Builder, x: ir.Value, g: ir.Value, mean: ir.Value, var: ir.Value, scale: ir.Value
    ) -> tuple[ir.Value, ...]:
        return _standard_backward(op, x, g, Statistics(mean, var, batch.epsilon), scale)

    inputs = [x, g, batch.mean, batch.var, scale]
    if not _has_kernel(x, scale):
        grad_x, per_scale, per_bias = body(op, *inputs)
    else:
        grad_x, per_scale, per_bias = outline(op, "BatchNormGrad", inputs, body, epsilon=batch.epsilon)
    return grad_x, per_scale, per_bias


def _standard_backward(
    op: Builder, x: ir.Value, g: ir.Value, batch: Statistics, scale: ir.Value
) -> tuple[ir.Value, ir.Value, ir.Value]:
    per_bias = _over_channels(op, op.ReduceMean, g)
    product = _over_channels(op, op.ReduceMean, op.Mul(g, x))
    # mean(g X^) = (mean(g X) - mean(X) mean(g)) / deviation, as a `standardize` of that row.
    per_scale = _standardize_row(op, product, Statistics(op.Mul(batch.mean, per_bias), batch.var, batch.epsilon))
    return project(op, x, g, batch, per_scale, per_bias, scale), per_scale, per_bias


def project(
    op: Builder,
    x: ir.Value,
    g: ir.Value,
    batch: Statistics,
    slope: ir.Value,
    shift: ir.Value,
    scale: ir.Value | None = None,
) -> ir.Value:
    """scale / deviation * (g - slope * X^ - shift) for each channel, in three passes over memory."""
    away = op.Sub(g, standardize(op, x, batch, slope, shift))
    return standardize(op, away, Statistics(fill(op, batch.mean, 0.0), batch.var, batch.epsilon), scale)


def standardize(
    op: Builder, v: ir.Value, by: Statistics, scale: ir.Value | None = None, shift: ir.Value | None = None
) -> ir.Value:
    """scale * (v - mean) / deviation + shift for v [batch, channels, ...]; by default scale is 1 and shift 0."""
    one = fill(op, by.mean, 1.0) if scale is None else scale
    zero = fill(op, by.mean, 0.0) if shift is None else shift
    return op.BatchNormalization(v, one, zero, by.mean, by.var, epsilon=by.epsilon)


def fill(op: Builder, like: ir.Value, content: float) -> ir.Value:
    """`content` in the shape of `like`; a constant where that is fixed."""
    shape = dims(like)
    if is_static(shape):
        return op.constant(np.full([d for d in shape if isinstance(d, int)], content), dtype_of(like))
    return op.full_like(like, content)


def count_elements_per(op: Builder, part: ir.Value, whole: ir.Value) -> ir.Value:
    """The number of elements of `whole` for each one of `part`: a scalar of the type of `whole`."""
    have, want = static_size(dims(whole)), static_size(dims(part))
    if have is not None and want:
        return op.constant(have / want, dtype_of(whole))
    return op.Cast(op.Div(op.Size(whole), op.Size(part)), to=int(dtype_of(whole)))


def cast(op: Builder, v: ir.Value, dtype: ir.DataType) -> ir.Value:
    return v if v.dtype == dtype else op.Cast(v, to=int(dtype))


def _standardize_row(op: Builder, v: ir.Value, by: Statistics, scale: ir.Value | None = None) -> ir.Value:
    """`standardize` for v [channels], as a batch of one: one node instead of four small ones."""
    return op.reshape_like(standardize(op, op.Unsqueeze(v, [0]), by, scale), v)


def _over_channels(op: Builder, reduce: Callable[..., ir.Value], v: ir.Value) -> ir.Value:
    """Sum or mean over all axes but the second. First over the inner axes, which reads memory in order."""
    inner = list(range(2, rank(v)))
    per_example = reduce(v, inner, keepdims=0) if inner else v
    return reduce(per_example, [0], keepdims=0)


def _channels_second(op: Builder, v: ir.Value) -> ir.Value:
    # ONNX takes a tensor of one axis as a batch with one channel.
    return v if rank(v) > 1 else op.Unsqueeze(v, [1])
