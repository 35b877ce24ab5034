"""Per-example gradients, clipped one by one, for differentially private training (DP-SGD, Abadi et al. 2016)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from archipel.autodiff import differentiate
from archipel.bundle.roles import Noise
from archipel.errors import TrainingError
from archipel.graph.build import Builder
from archipel.graph.control import branch, scan
from archipel.graph.model import TensorInfo
from archipel.graph.shapes import dims, dtype_of
from archipel.training.arguments import number
from archipel.training.assembly import Assembly
from archipel.training.example_lanes import ExampleGradient, fit_lanes, lanes_of
from archipel.training.hashing import Keys, mix
from archipel.training.losses import Loss, counted, mean, total
from archipel.training.nesting import enclose
from archipel.training.optimizers import cast
from archipel.training.precision import LossScale
from archipel.training.transforms import global_norm, norm_dtype

NOISE_UNITS = 2**16
"""The noise has a standard deviation of this many units of its grid."""


@dataclass(frozen=True)
class PerExample:
    """Each example's gradient is scaled to an L2 norm of at most `clip` over all parameters, then they are summed.

    An example whose gradient has an infinite or NaN element counts as zeros. Norms, products and sums are float32, or
    float64 where a gradient is. With a noise multiplier `noise` above 0 the sum gets Gaussian noise of standard
    deviation noise * clip. Sum and noise lie on a grid of noise * clip / NOISE_UNITS: the sum is rounded to it, and the
    noise is a discrete Gaussian in units of it (Canonne et al. 2020). Rounding changes the norm of a sum of d elements
    by at most sqrt(d) / 2 units.
    """

    clip: float
    noise: float


def per_example(clip: float = 1.0, noise: float = 0.0) -> PerExample:
    """The option `per_example` of a step: gradients of single examples, each clipped, then summed and noised.

    The loss of an example is the mean over its own labels that are not ignored, each times its class weight. It does
    not depend on the other examples of the batch.

    Arguments:
        clip: the L2 norm that an example's gradient may have over all parameters together; above 0.
        noise: the noise multiplier of DP-SGD, the noise's standard deviation over `clip`; 0 or more.

    Raises:
        TrainingError: for a number out of these bounds.

    Example:
        step_graph(model, losses.cross_entropy(), optimizers.sgd(lr=0.1), per_example=per_example(clip=1.0, noise=1.1))
    """
    return PerExample(number("per_example", "clip", clip, ends="()"), number("per_example", "noise", noise))


def example_gradients(
    work: Assembly, loss: Loss, options: PerExample, streams: Sequence[Keys], scaling: LossScale | None
) -> tuple[ir.Value, list[ir.Value]]:
    """The mean loss, and the sums of clipped gradients, noised and divided by the batch size.

    The gradients are those of the model on a batch of one: either all examples are lanes of one computation, or a Scan
    takes one after the other, whichever `fit_lanes` says is faster. `streams` are the keys of the model's random
    numbers: each example mixes them with its own number, or all would drop the same elements.
    """
    _check(work)
    op, parameters, fields = work.op, work.parameters, work.fields
    keys = [key for pair in streams for key in pair]
    batch = {dims(field)[0] for field in fields} - {None}

    inner = op.body("example")
    items = [inner.input(inner.unique("example/item"), dtype_of(v), _item_shape(v)) for v in fields]
    # The number of the example, only where random numbers need it.
    place = inner.input(inner.unique("example/number"), ir.DataType.UINT32, []) if keys else None
    example = {field: inner.Unsqueeze(item, [0]) for field, item in zip(fields, items)}
    own = {key: mix(inner, inner.BitwiseXor(key, place)) for key in keys}
    # Nodes that read only parameters move in too: `differentiate` works inside the body, up to the parameters.
    enclose(inner, work.graph, {**example, **own}, parameters)
    _one_row(inner, batch)
    value = _objective(inner, loss, work.output, example[work.label])
    seed = inner.constant(np.ones((), dtype_of(value).numpy())) if scaling is None else scaling.seed(inner, value)
    gradients = differentiate(inner, {value: seed}, parameters)
    run = _as_lanes if fit_lanes(inner.graph, gradients) else _one_after_the_other
    sums, values = run(work, _Example(inner, items, place, value, gradients), _Clip(options.clip, scaling))
    with op.scope("examples"):
        if scaling is not None:
            sums = scaling.unscale(op, sums)
        if options.noise:  # noise goes onto the sum, whose sensitivity is the clip; only then is it divided
            sums = [_noised(work, total, p, options) for total, p in zip(sums, parameters)]
        count = op.Size(values)
        means = [op.Div(total, op.Cast(count, to=int(dtype_of(total)))) for total in sums]
        narrow = [cast(op, mean, dtype_of(parameter)) for mean, parameter in zip(means, parameters)]
        return op.ReduceMean(values, [0], keepdims=0), narrow


@dataclass(frozen=True)
class _Example:
    """The computation for one example, in a body: its inputs (the fields' items, and the example's number where random
    numbers need it), its loss and its gradients."""

    inner: Builder
    items: list[ir.Value]
    number: ir.Value | None
    loss: ir.Value
    gradients: list[ir.Value]


@dataclass(frozen=True)
class _Clip:
    """The factors of gradients, which are `scaling` times the true ones where there is a loss scale.

    An example whose gradient is not finite must not make the sum so: that would be more than the clip. Its factor is 0.
    With a loss scale it does make the sum so, and the update is skipped.
    """

    limit: float
    scaling: LossScale | None

    def factor(self, op: Builder, norm: ir.Value) -> ir.Value:
        """What gradients of this norm are multiplied by."""
        limit = self.limit if self.scaling is None else op.Mul(self.scaling.seed(op, norm), self.limit)
        # A gradient of zeros gives limit / 0 = inf, so the factor is 1.
        factor = op.Min(op.Div(limit, norm), 1.0)
        return factor if self.scaling else op.Where(op.IsNaN(norm), 0.0, factor)


def _as_lanes(work: Assembly, one: _Example, clip: _Clip) -> tuple[list[ir.Value], ir.Value]:
    """The sums of clipped gradients and the losses, all examples at once."""
    op = work.op
    lanes = dict(zip(one.items, work.fields))
    if one.number is not None:
        count = op.Squeeze(op.Shape(work.fields[0], start=0, end=1), [0])
        lanes[one.number] = op.Cast(op.Range(np.array(0), count, np.array(1)), to=int(ir.DataType.UINT32))
    values, *found = lanes_of(op, one.inner.graph, lanes, [one.loss, *one.gradients])
    gradients = [ExampleGradient.of(value) for value in found]
    dtype = norm_dtype(found)
    squares = [gradient.squares(op, dtype) for gradient in gradients]
    norms = op.Sqrt(op.Sum(*squares) if len(squares) > 1 else squares[0])
    factors = clip.factor(op, norms)

    def totals(op: Builder, kept: ir.Value | None = None) -> list[ir.Value]:
        return [g.total(op, factors, parameter, kept) for g, parameter in zip(gradients, work.parameters)]

    if clip.scaling is not None:
        return totals(op), values
    # Zeros in the place of what is not finite cost time, and nearly all batches need none.
    every = op.Greater(op.ReduceMin(factors, keepdims=0), 0.0)
    sums = branch(op, every, totals, lambda op: totals(op, op.Unsqueeze(op.Greater(factors, 0.0), [1])))
    return sums, values


def _one_after_the_other(work: Assembly, one: _Example, clip: _Clip) -> tuple[list[ir.Value], ir.Value]:
    """The sums of clipped gradients and the losses, by a Scan over the examples."""
    op = work.op
    dtype = norm_dtype(one.gradients)
    zeros = [cast(op, op.full_like(parameter, 0.0), dtype) for parameter in work.parameters]
    # The number of the example, carried and counted up.
    number = [op.constant(np.zeros((), np.uint32))] if one.number is not None else []

    def body(inner: Builder, carried: list[ir.Value], items: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
        sums, place = carried[: len(zeros)], carried[len(zeros) :]
        nodes = list(one.inner.graph)
        one.inner.graph.remove(nodes)
        inner.graph.extend(nodes)
        for old, new in zip([*one.items, *([one.number] if one.number is not None else [])], [*items, *place]):
            old.replace_all_uses_with(new)
        factor = clip.factor(inner, global_norm(inner, one.gradients))

        def added(op: Builder) -> list[ir.Value]:
            clipped = [op.Mul(cast(op, g, dtype), factor) for g in one.gradients]
            return [op.Add(total, gradient) for total, gradient in zip(sums, clipped)]

        if clip.scaling is not None:
            following = added(inner)
        else:  # what is not finite stays so, whatever it is multiplied by
            following = branch(inner, inner.Greater(factor, 0.0), added, lambda _: sums, like=sums)
        return [*following, *(inner.Add(n, np.array(1, np.uint32)) for n in place)], [one.loss]

    carried, (values,) = scan(op, body, [*zeros, *number], work.fields, name="examples")
    return carried[: len(zeros)], values


def _item_shape(field: ir.Value) -> list[int | str]:
    return [f"{field.name}_dim{i}" if d is None else d for i, d in enumerate(dims(field))][1:]


def _check(work: Assembly) -> None:
    for field in work.fields:
        if not dims(field) or isinstance(dims(field)[0], int):
            raise TrainingError(
                f"per_example: input {field.name!r} has the shape {list(dims(field))}, but its first axis must be "
                "a free batch axis; export the model with one (from_torch does with dynamic_batch=True)"
            )
    for node in work.graph:
        if node.op_type == "BatchNormalization" and "training_mode" in node.attributes:
            raise TrainingError(
                f"per_example: BatchNormalization {node.name!r} normalizes with statistics of the whole batch, so an "
                "example has no gradient of its own; use batch_norm='frozen' or 'folded', or another normalization"
            )


def _one_row(inner: Builder, batch: set[int | str | None]) -> None:
    """Correct the shapes of the nodes that moved into the body, where the batch is 1."""
    for node in inner.graph:
        for value in node.outputs:
            if value.shape is not None:
                value.shape = ir.Shape([1 if d in batch else d for d in dims(value)])


def _objective(op: Builder, loss: Loss, output: ir.Value, label: ir.Value) -> ir.Value:
    """The mean loss of the labels that are not ignored.

    A step on the whole batch divides by the sum of the labels' weights. For a single example that would undo its class
    weight, and it would be NaN for an example whose labels are all ignored.
    """
    values, weights = loss.values(op, output, label), loss.weights(op, output, label)
    if weights is None:
        return mean(op, values)
    count = op.Max(op.Cast(counted(op, values, weights), to=int(dtype_of(values))), 1.0)
    return op.Div(total(op, values), count)


def _noised(work: Assembly, total: ir.Value, parameter: ir.Value, options: PerExample) -> ir.Value:
    op, unit = work.op, options.noise * options.clip / NOISE_UNITS
    # One example changes the sum by up to `clip`. The sums with it and without it are both rounded, and with d elements
    # that moves each of the two by up to sqrt(d) / 2 units.
    elements = sum(math.prod(map(int, TensorInfo.of(each).shape)) for each in work.parameters)
    sensitivity = options.clip + math.sqrt(elements) * unit
    noise = work.input(
        Noise, f"{parameter.name}.noise", ir.DataType.INT32, TensorInfo.of(parameter).shape,
        distribution="discrete_gaussian", scale=float(NOISE_UNITS),
        multiplier=options.noise * options.clip / sensitivity,
    )  # fmt: skip
    # In float64, which has all integers up to 2^53: sums of many examples in units of the grid are exact.
    wide = int(ir.DataType.DOUBLE)
    rounded = op.Round(op.Div(op.Cast(total, to=wide), unit))
    return cast(op, op.Mul(op.Add(rounded, op.Cast(noise, to=wide)), unit), dtype_of(total))
