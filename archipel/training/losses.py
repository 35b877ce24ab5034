"""Losses as graphs: each emits one value for each label and, for classifications, whether the prediction was right.

Values and gradients are those of torch.nn.functional.

Example:
    step = archipel.training.step_graph(model, losses.huber(delta=0.5), optimizers.adam(lr=0.001))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import onnx_ir as ir

from archipel.errors import TrainingError
from archipel.graph.build import Builder
from archipel.graph.shapes import Dim, dims, dtype_of, is_float, rank
from archipel.graph.walk import trace_back
from archipel.training.arguments import flag, number, numbers, whole

Sizes = Sequence[int | str]

LOSS_METHODS = ("label", "values", "weights", "correct")
_LARGEST = 2**63 - 1
# What leaves probabilities what they are: a mean of some is one, too.
_HAND_ON = frozenset({"Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "ReduceMean"})


class Loss(Protocol):
    """The methods that a step needs. `output` is the model's first output, `label` the graph input made for it."""

    def label(self, output: ir.Value) -> tuple[ir.DataType, Sizes]:
        """Type and shape of the label for this `output`. Raises TrainingError where the loss does not fit it."""

    def values(self, op: Builder, output: ir.Value, label: ir.Value) -> ir.Value:
        """The loss of each label, times its weight; a step minimizes their weighted mean, which is `objective`."""

    def weights(self, op: Builder, output: ir.Value, label: ir.Value) -> ir.Value | None:
        """The weight of each label in the mean, in the shape and type of `values`; None: 1 each."""

    def correct(self, op: Builder, output: ir.Value, label: ir.Value) -> ir.Value | None:
        """Whether each prediction was right, bool in the shape of `values`; None for a loss of no classification.

        False where the weight is 0."""


@dataclass(frozen=True)
class CrossEntropy:
    """Softmax cross entropy: logits with the classes along `axis`, int64 labels in their shape without that axis."""

    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] | None = None
    ignore_index: int | None = None
    axis: int = 1

    def label(self, output: ir.Value) -> tuple[ir.DataType, Sizes]:
        expected = "[batch, classes, ...]" if self.axis == 1 else f"with the classes along axis {self.axis}"
        shape, axis = _logits("cross_entropy", expected, output, self.axis)
        if shape[axis] == 1:
            raise TrainingError(
                f"cross_entropy: the output {output.name!r} has one logit, and the softmax of one is always 1; use "
                f"binary_cross_entropy, with labels of 0.0 and 1.0 in the shape {list(shape)}"
            )
        if self.class_weights is not None and isinstance(shape[axis], int) and shape[axis] != len(self.class_weights):
            raise TrainingError(
                f"cross_entropy: {len(self.class_weights)} class_weights, but the output {output.name!r} has "
                f"{shape[axis]} classes along axis {axis}; its shape is {list(shape)}"
            )
        sizes = _sizes(shape)
        return ir.DataType.INT64, [*sizes[:axis], *sizes[axis + 1 :]]

    def values(self, op: Builder, output: ir.Value, label: ir.Value) -> ir.Value:
        axis = self.axis % rank(output)
        # LogSoftmax, not Log of Softmax, which is log 0 for classes of low probability.
        scores, classes = op.LogSoftmax(output, axis=axis), self._classes(op, label)
        picked = op.Squeeze(op.GatherElements(scores, op.Unsqueeze(classes, [axis]), axis=axis), [axis])
        if self.class_weights is not None:
            picked = op.Mul(picked, op.Gather(self._table(op, output), classes))
        if self.label_smoothing:
            # As in PyTorch, the part that goes to all classes has each class's own weight, and not the label's.
            if self.class_weights is not None:
                along = [-1 if i == axis else 1 for i in range(rank(output))]
                scores = op.Mul(scores, op.constant(np.reshape(self.class_weights, along), dtype_of(output)))
            uniform = op.ReduceMean(scores, [axis], keepdims=0)
            picked = op.Add(op.Mul(picked, 1.0 - self.label_smoothing), op.Mul(uniform, self.label_smoothing))
        result = op.Neg(picked)
        if self.ignore_index is not None:
            # Where, not a product with 0, which would make NaN of an infinite loss.
            result = op.Where(op.Equal(label, self.ignore_index), 0.0, result)
        return result

    def weights(self, op: Builder, output: ir.Value, label: ir.Value) -> ir.Value | None:
        if self.class_weights is not None:
            result = op.Gather(self._table(op, output), self._classes(op, label))
            if self.ignore_index is not None:
                result = op.Where(op.Equal(label, self.ignore_index), 0.0, result)
            return result
        if self.ignore_index is not None:
            counts = op.Not(op.Equal(label, self.ignore_index))
            result = op.Cast(counts, to=int(dtype_of(output)))
            return result
        return None

    def correct(self, op: Builder, output: ir.Value, label: ir.Value) -> ir.Value:
        result = op.Equal(op.ArgMax(output, axis=self.axis % rank(output), keepdims=0), label)
        weights = self.weights(op, output, label)
        # As bool a weight other than 0 is true: labels that do not count are not right.
        return result if weights is None else op.And(result, op.Cast(weights, to=int(ir.DataType.BOOL)))

    def _classes(self, op: Builder, label: ir.Value) -> ir.Value:
        """The labels as indices; a wrong one makes ONNX Runtime fail."""
        if self.ignore_index is not None:
            label = op.Where(op.Equal(label, self.ignore_index), 0, label)
        # Gather counts negative indices from the end: without its sign bit, -1 is far above all classes.
        return op.BitwiseAnd(label, _LARGEST)

    def _table(self, op: Builder, output: ir.Value) -> ir.Value:
        return op.constant(self.class_weights, dtype_of(output))


class _Unweighted:
    def weights(self, op: Builder, output: ir.Value, label: ir.Value) -> None:
        return None


class _Regression(_Unweighted):
    """The label has the output's shape and type."""

    name: str

    def label(self, output: ir.Value) -> tuple[ir.DataType, Sizes]:
        if not is_float(output):
            raise TrainingError(f"{self.name}: expected a floating-point output, {output.name!r} is {output.dtype}")
        return dtype_of(output), _sizes(dims(output))

    def correct(self, op: Builder, output: ir.Value, label: ir.Value) -> ir.Value | None:
        return None


@dataclass(frozen=True)
class BinaryCrossEntropy(_Regression):
    """-p y log sigmoid(x) - (1 - y) log(1 - sigmoid(x)): logits x and probabilities y of one shape and type."""

    pos_weight: float | tuple[float, ...] = 1.0
    name = "binary_cross_entropy"

    def label(self, output: ir.Value) -> tuple[ir.DataType, Sizes]:
        dtype, sizes = super().label(output)
        _refuse_probabilities(self.name, output, "Sigmoid")
        if isinstance(self.pos_weight, tuple):
            last = dims(output)[-1] if rank(output) else 0
            if isinstance(last, int) and last != len(self.pos_weight):
                raise TrainingError(
                    f"binary_cross_entropy: {len(self.pos_weight)} numbers in pos_weight do not fit the last axis of "
                    f"the output {output.name!r}, whose shape is {list(dims(output))}"
                )
        return dtype, sizes

    def values(self, op: Builder, output: ir.Value, label: ir.Value) -> ir.Value:
        if self.pos_weight == 1.0:  # in terms of softplus neither logarithm gets a 0, however large the logits are
            return op.Sub(_softplus(op, output), op.Mul(output, label))
        # -log sigmoid(x) = softplus(-x), -log(1 - sigmoid(x)) = x + softplus(-x).
        extra = op.constant(np.subtract(self.pos_weight, 1.0), dtype_of(output))
        positive = op.Mul(_softplus(op, op.Neg(output)), op.Add(op.Mul(label, extra), 1.0))
        result = op.Add(op.Mul(output, op.Sub(1.0, label)), positive)
        return result

    def correct(self, op: Builder, output: ir.Value, label: ir.Value) -> ir.Value:
        return op.Equal(op.Greater(output, 0.0), op.Greater(label, 0.5))


@dataclass(frozen=True)
class SquaredError(_Regression):
    """(x - y)^2."""

    name = "mse"

    def values(self, op: Builder, output: ir.Value, label: ir.Value) -> ir.Value:
        away = op.Sub(output, label)
        return op.Mul(away, away)


@dataclass(frozen=True)
class AbsoluteError(_Regression):
    """|x - y|."""

    name = "l1"

    def values(self, op: Builder, output: ir.Value, label: ir.Value) -> ir.Value:
        return op.Abs(op.Sub(output, label))


@dataclass(frozen=True)
class Huber(_Regression):
    """(x - y)^2 / 2 where |x - y| is at most delta, else delta (|x - y| - delta / 2) (Huber 1964)."""

    delta: float = 1.0
    name = "huber"

    def values(self, op: Builder, output: ir.Value, label: ir.Value) -> ir.Value:
        # With d the difference and c = d cut off at +-delta, both branches are c (d - c / 2): no Where is needed.
        away = op.Sub(output, label)
        near = op.Clip(away, -self.delta, self.delta)
        return op.Mul(near, op.Sub(away, op.Mul(near, 0.5)))


@dataclass(frozen=True)
class KLDivergence(_Unweighted):
    """sum of y (log y - log softmax(x)) along `axis`: one value for each distribution y."""

    log_target: bool = False
    axis: int = 1

    def label(self, output: ir.Value) -> tuple[ir.DataType, Sizes]:
        shape, _ = _logits("kl_divergence", f"with the classes along axis {self.axis}", output, self.axis)
        return dtype_of(output), _sizes(shape)

    def values(self, op: Builder, output: ir.Value, label: ir.Value) -> ir.Value:
        axis = self.axis % rank(output)
        if self.log_target:
            target, logarithm = op.Exp(label), label
        else:
            # The limit of y log y at 0 is 0; the logarithm of 1 makes it so.
            target, logarithm = label, op.Log(op.Where(op.Greater(label, 0.0), label, 1.0))
        each = op.Mul(target, op.Sub(logarithm, op.LogSoftmax(output, axis=axis)))
        return op.ReduceSum(each, [axis], keepdims=0)

    def correct(self, op: Builder, output: ir.Value, label: ir.Value) -> None:
        return None


def cross_entropy(
    label_smoothing: float = 0.0,
    class_weights: Sequence[float] | None = None,
    ignore_index: int | None = None,
    *,
    axis: int = 1,
) -> CrossEntropy:
    """-log softmax(logits)[label], averaged over the labels. Logits [batch, classes, ...], labels int64 [batch, ...].

    Arguments:
        label_smoothing: e replaces the label by (1 - e) label + e / classes (Szegedy et al. 2016, section 7).
        class_weights: one number of 0 or more for each class; the mean is weighted with that of each label.
        ignore_index: labels equal to it do not count. A batch that has no others gives NaN.
        axis: that of the classes; -1 for logits [batch, ..., classes], as language models have them.

    Labels are class numbers from 0. Raises TrainingError for a number out of bounds.

    Example:
        step_graph(model, losses.cross_entropy(label_smoothing=0.1), optimizers.adam())
    """
    weights = None
    if class_weights is not None:
        weights = numbers("cross_entropy", "class_weights", class_weights)
        if not any(weights):
            raise TrainingError(f"cross_entropy: class_weights must have a number above 0, is {weights}")
    smoothing = number("cross_entropy", "label_smoothing", label_smoothing, 0.0, 1.0)
    if ignore_index is not None:
        ignore_index = whole("cross_entropy", "ignore_index", ignore_index)
    return CrossEntropy(smoothing, weights, ignore_index, whole("cross_entropy", "axis", axis))


def binary_cross_entropy(pos_weight: float | Sequence[float] = 1.0) -> BinaryCrossEntropy:
    """Cross entropy of sigmoid(output) with labels from 0 to 1, in the output's shape and type.

    Arguments:
        pos_weight: multiplies the loss of positive labels; one number, or one for each place of the last axis.
    """
    if isinstance(pos_weight, Iterable) and not isinstance(pos_weight, str):
        return BinaryCrossEntropy(numbers("binary_cross_entropy", "pos_weight", pos_weight))
    return BinaryCrossEntropy(number("binary_cross_entropy", "pos_weight", pos_weight))


def mse() -> SquaredError:
    """Squared difference of output and label."""
    return SquaredError()


def l1() -> AbsoluteError:
    """Absolute difference of output and label."""
    return AbsoluteError()


def huber(delta: float = 1.0) -> Huber:
    """(output - label)^2 / 2 up to a difference of `delta`, which is above 0, and linear beyond it (Huber 1964)."""
    return Huber(number("huber", "delta", delta, ends="(]"))


def kl_divergence(log_target: bool = False, *, axis: int = 1) -> KLDivergence:
    """Divergence of softmax(output) from the label's distribution, averaged over the distributions.

    It is PyTorch's kl_div(log_softmax(output), label) summed along `axis` ("batchmean" for [batch, classes]). Outputs
    are logits [batch, classes, ...], labels probabilities of the same shape and type.

    Arguments:
        log_target: the labels are logarithms of probabilities.
        axis: that of the classes.
    """
    return KLDivergence(flag("kl_divergence", "log_target", log_target), whole("kl_divergence", "axis", axis))


def objective(op: Builder, loss: Loss, output: ir.Value, label: ir.Value) -> ir.Value:
    """The weighted mean of the loss over all labels, a scalar."""
    values, weights = loss.values(op, output, label), loss.weights(op, output, label)
    if weights is None:
        return mean(op, values)
    # By the sum of the weights, not by their number, as PyTorch's reduction="mean" does.
    return op.Div(total(op, values), total(op, weights))


def counted(op: Builder, values: ir.Value, weights: ir.Value | None) -> ir.Value:
    """How many labels have a weight other than 0, int64 scalar; `values` and `weights` are the loss's."""
    if weights is None:
        return op.Size(values)
    return total(op, op.Cast(op.Cast(weights, to=int(ir.DataType.BOOL)), to=int(ir.DataType.INT64)))


def mean(op: Builder, values: ir.Value) -> ir.Value:
    """Scalar mean over all labels."""
    return op.ReduceMean(values, list(range(rank(values))), keepdims=0)


def total(op: Builder, values: ir.Value) -> ir.Value:
    """Scalar sum over all labels."""
    return op.ReduceSum(values, list(range(rank(values))), keepdims=0)


def _logits(function: str, expected: str, output: ir.Value, axis: int) -> tuple[tuple[Dim, ...], int]:
    """The output's shape, and its axis of classes counted from the front."""
    shape = dims(output)
    if len(shape) < 2 or not is_float(output) or not -len(shape) <= axis < len(shape):
        raise TrainingError(
            f"{function}: expected floating-point logits {expected}, "
            f"the output {output.name!r} has shape {list(shape)} and type {output.dtype}"
        )
    _refuse_probabilities(function, output, "Softmax", axis % len(shape))
    return shape, axis % len(shape)


def _refuse_probabilities(function: str, output: ir.Value, activation: str, axis: int | None = None) -> None:
    """Refuse an output that is computed by the activation which the loss itself applies.

    It would be applied twice: the loss would be wrong, and training slow, without any error.
    """
    node = trace_back(output, _HAND_ON).producer()
    before = None if node is None or node.op_type != activation else node.inputs[0]
    if node is None or before is None:
        return
    if axis is not None and node.attributes.get_int("axis", -1) % rank(before) != axis and output is node.outputs[0]:
        return  # a softmax over something else than the classes
    remedy = (
        f"it is an output, too: pass loss_output={before.name!r}"
        if before.is_graph_output()
        else f"export the model without its last {activation.lower()}, or with that value as an output"
    )
    if activation == "Sigmoid":
        remedy += "; or choose the loss mse, which may read probabilities"
    raise TrainingError(
        f"{function}: the output {output.name!r} is a {activation.lower()} already ({activation} {node.name!r}), which "
        f"the loss applies itself; let it read the value before it, {before.name!r}: {remedy}"
    )


def _sizes(shape: Sequence[Dim]) -> list[int | str]:
    """The shape with a name for each size that is not known."""
    return [f"label_dim{i}" if d is None else d for i, d in enumerate(shape)]


def _softplus(op: Builder, value: ir.Value) -> ir.Value:
    """log(1 + exp(value))."""
    if dtype_of(value) == ir.DataType.FLOAT:
        result = op.Softplus(value)
    else:
        # ONNX Runtime's Softplus is float32 only; log(exp(value) + exp(0)) is the same and does not overflow either.
        pair = op.Concat(op.Unsqueeze(value, [-1]), op.Unsqueeze(op.full_like(value, 0.0), [-1]), axis=-1)
        result = op.ReduceLogSumExp(pair, [-1], keepdims=0)
    return result
