"""A training step as one graph: forward, loss, gradients and optimizer in standard operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

import numpy as np
import onnx_ir as ir

from archipel.autodiff import differentiate
from archipel.bundle.roles import Metric
from archipel.errors import NotDifferentiableError, TrainingError
from archipel.graph.model import Model
from archipel.graph.outline import Functions
from archipel.graph.shapes import dtype_of
from archipel.training.arguments import check_part, check_trained_model, flag, whole
from archipel.training.assembly import Assembly
from archipel.training.batch_norm import BatchNorm, check_batch_norm, prepared, track
from archipel.training.dropout import activate, deactivate
from archipel.training.losses import LOSS_METHODS, Loss, counted, mean, objective, total
from archipel.training.nesting import repeat
from archipel.training.optimizers import OPTIMIZER_METHODS, Optimizer
from archipel.training.per_example import PerExample, example_gradients
from archipel.training.precision import LossScale, Mixed, autocast, mixed
from archipel.training.recompute import Recompute, check_recompute, mark_recomputed
from archipel.training.transforms import Transform
from archipel.training.update import Accumulation, Update

LOSS, ACCURACY = "loss", "accuracy"


class StepOptions(TypedDict, total=False):
    """The keyword arguments of `step_graph` after `trainable`."""

    steps: int
    transforms: Sequence[Transform]
    accumulate: int
    batch_norm: BatchNorm
    dropout: bool
    per_example: PerExample | None
    precision: Literal["float32", "mixed"] | Mixed
    kernels: bool
    recompute: Literal["auto"] | Recompute | None


def step_graph(
    model: Model,
    loss: Loss,
    optimizer: Optimizer,
    trainable: str | Sequence[str] = "*",
    steps: int = 1,
    *,
    transforms: Sequence[Transform] = (),
    accumulate: int = 1,
    batch_norm: BatchNorm = "train",
    dropout: bool = True,
    per_example: PerExample | None = None,
    precision: Literal["float32", "mixed"] | Mixed = "float32",
    kernels: bool = False,
    recompute: Literal["auto"] | Recompute | None = None,
) -> Model:
    """Make a `train` program: one optimizer step on one batch, or `steps` of them in one graph.

    Arguments:
        model: a model with parameters. It is not changed.
        loss: one of training.losses, of the model's first output.
        optimizer: one of training.optimizers.
        trainable: a glob over parameter names, or a list of globs. Other parameters stay initializers; one that the
            loss does not depend on keeps its value.
        steps: minibatches, one after the other. With more than 1 the model's inputs, `label` and `loss` get a first
            axis of `steps`.
        transforms: change the gradients before the optimizer, in this order (training.transforms).
        accumulate: A makes an update at every A-th minibatch, with the mean of A gradients. Gradients of fewer than A
            minibatches at the end of a round are dropped.
        batch_norm: "train" normalizes with the batch's statistics and keeps running ones as state, of which `convert`
            makes parameters that a federation averages; "frozen" normalizes with the model's own; "folded" puts them
            into the layer before, where there is one.
        dropout: whether the model's Dropout drops, with masks from the inputs `seed` and `step`.
        per_example: gradients of single examples, clipped one by one (`training.per_example`).
        precision: "mixed", or `training.mixed` with other numbers: products in float16 with loss scaling.
        kernels: write convolutions of trained weights, BatchNormalization, an LSTM's loop over time and the gradients
            of these, of Relu and of Clip as functions of the domain `archipel.kernels` with bodies of standard
            operators. ONNX Runtime runs the kernel pack's operators in their place where `archipel[kernels]` is
            installed, and the bodies elsewhere. Not with `per_example`, whose examples run as lanes of standard
            operators.
        recompute: "auto", or `training.recompute` with a budget of bytes: gradients compute parts of the forward pass
            once more instead of keeping their values, which takes less memory and more time. The gradients are the
            same. None: nothing is computed again, except what `autodiff.checkpoint` has marked in the model.

    Returns:
        A Model with its signature. Inputs: the model's own, `label`, each trainable parameter under its own name, its
        state as `<parameter>.<state>`, the hyperparameters of optimizer and transforms (scalar float32), and those of
        the options. Outputs: `<tensor>.next` for each parameter and state, and the metrics `loss` and, for losses of
        classification and without `per_example`, `accuracy` (float32 scalar, the share of the labels that count), both
        of the batch before the step. `initial` has the first values of parameters and statistics.

    Raises:
        TrainingError: for names that collide or match nothing, and options that do not fit together.
        AutodiffError: where a gradient cannot be built.

    Example:
        step = step_graph(Model.from_onnx("model.onnx"), losses.cross_entropy(), optimizers.sgd(lr=0.1), "head.*")
        history = run_steps(step, batches)
    """
    check_trained_model("step_graph", model, trainable)
    check_part("step_graph", "losses", loss, LOSS_METHODS)
    check_part("step_graph", "optimizers", optimizer, OPTIMIZER_METHODS)
    check_options(
        steps=steps, transforms=transforms, accumulate=accumulate, batch_norm=batch_norm, dropout=dropout,
        per_example=per_example, precision=precision, kernels=kernels, recompute=recompute,
    )  # fmt: skip
    steps, accumulate = int(steps), int(accumulate)  # an option may be a NumPy integer
    # In inference mode, whatever mode the file is in: `track` and `activate` turn on what is to train.
    work = Assembly(prepared(model, batch_norm), loss, trainable)
    # The forward graph is completed before it is differentiated: gradients follow each of these changes.
    averages = track(work) if batch_norm == "train" else []
    streams = activate(work) if dropout else deactivate(work)
    work.leave_idle()
    scaling = _mixed_precision(work, precision)
    # Not before: the gradients' rules put functions in the place of forward nodes, and functions have no rules.
    functions = work.op.outlined = Functions() if kernels else None
    update = Update(work, optimizer, transforms, accumulate, may_skip=scaling is not None)

    try:
        if per_example is None:
            value, gradients = _whole_batch(work, loss, scaling, recompute)
        else:
            value, gradients = example_gradients(work, loss, per_example, streams, scaling)
    except NotDifferentiableError as error:
        raise NotDifferentiableError(f"step_graph: {error}: trainable= chooses the trained parameters") from None
    when = None  # the condition of an update; None: always
    if accumulate > 1:
        accumulation = Accumulation(work, accumulate)
        gradients, when = accumulation.add(gradients), accumulation.due
    # After accumulating: one minibatch that is not finite makes the sum so, and the whole update is skipped.
    if scaling is not None:
        when = scaling.check(gradients, when)
        averages = scaling.unless_skipped(averages)
    update.emit(gradients, when)
    for average in averages:
        work.set_next(*average)
    work.add_result(Metric, LOSS, value, reduction="mean")
    if per_example is None and (right := _accuracy(work, loss)) is not None:
        work.add_result(Metric, ACCURACY, right, reduction="mean")
    program = work.finish("train")
    program = program if steps == 1 else repeat(program, steps)
    if functions is not None:
        functions.define(program.ir)
    return program


def check_options(
    *,
    steps: object = 1,
    transforms: object = (),
    accumulate: object = 1,
    batch_norm: object = "train",
    dropout: object = True,
    per_example: object = None,
    precision: object = "float32",
    kernels: object = False,
    recompute: object = None,
) -> None:
    """Refuse wrong values of StepOptions, whatever the model is. Raises TrainingError that names the option."""
    if not isinstance(transforms, Sequence):
        raise TrainingError(f"step_graph: transforms must be a list of training.transforms, is {transforms!r}")
    for transform in transforms:
        check_part("step_graph", "transforms", transform, ("hyperparameters", "apply"))
    if per_example is not None and not isinstance(per_example, PerExample):
        raise TrainingError(f"step_graph: per_example must be training.per_example(...), is {per_example!r}")
    whole("step_graph", "steps", steps, 1)
    whole("step_graph", "accumulate", accumulate, 1)
    check_batch_norm(batch_norm)
    check_recompute(recompute)
    flag("step_graph", "dropout", dropout)
    flag("step_graph", "kernels", kernels)
    for name, given in (("recompute", recompute is not None), ("kernels", bool(kernels))):
        if given and per_example is not None:
            raise TrainingError(
                f"step_graph: {name} goes with gradients of whole batches, not with per_example; leave one of them out"
            )
    if precision not in ("float32", "mixed") and not isinstance(precision, Mixed):
        raise TrainingError(
            f"step_graph: precision must be 'float32', 'mixed' or training.mixed(...), is {precision!r}"
        )
    if per_example is not None and per_example.noise and precision != "float32":
        raise TrainingError(
            "step_graph: with precision='mixed' gradients decide without noise whether an update is skipped, which "
            "per_example(noise=...) does not account for; leave precision='float32'"
        )


def _mixed_precision(work: Assembly, precision: Literal["float32", "mixed"] | Mixed) -> LossScale | None:
    if precision == "float32":
        return None
    autocast(work)
    return LossScale(work, mixed() if precision == "mixed" else precision)


def _accuracy(work: Assembly, loss: Loss) -> ir.Value | None:
    """The share of right answers among the labels whose weight is not 0; None for a loss of no classification."""
    op = work.op
    with op.scope(ACCURACY):
        correct = loss.correct(op, work.output, work.label)
        if correct is None:
            return None
        right, weights = op.Cast(correct, to=int(ir.DataType.FLOAT)), loss.weights(op, work.output, work.label)
        if weights is None:
            return mean(op, right)
        # 0 of none: a batch may have only labels that do not count.
        count = op.Max(op.Cast(counted(op, right, weights), to=int(ir.DataType.FLOAT)), 1.0)
        return op.Div(total(op, right), count)


def _whole_batch(
    work: Assembly, loss: Loss, scaling: LossScale | None, recompute: Literal["auto"] | Recompute | None
) -> tuple[ir.Value, list[ir.Value]]:
    op = work.op
    with op.scope(LOSS):
        value = objective(op, loss, work.output, work.label)
        # The cotangent of the loss: 1, or the loss scale, by which `unscale` divides the gradients again.
        seed = op.constant(np.ones((), dtype_of(value).numpy())) if scaling is None else scaling.seed(op, value)
    if recompute is not None:
        mark_recomputed(work, value, recompute)
    gradients = differentiate(op, {value: seed}, work.parameters)
    return value, gradients if scaling is None else scaling.unscale(op, gradients)
