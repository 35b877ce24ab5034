"""AdaRound: the integers of a layer's weight, chosen by what comes out of the layer (Nagel et al. 2020).

Rounding each weight to its nearest integer is not what changes the layer's output least. Each weight gets a variable V;
h(V), a rectified sigmoid from 0 to 1, says how far the weight is rounded up. V is trained on the error of the output,
while a growing penalty drives h to 0 or 1. Second moments of the layer's input give the error over all calibration data
at once:

    E |W x - D x'|^2 = sum of D (D A) - 2 D B + C,  A = E[x' x'^T], B = W E[x x'^T], C = the diagonal of W E[x x^T] W^T

where x is the layer's input in the float network and x' its input behind rounded layers (section 3.3, eq. 25).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from archipel.graph import Builder, Model
from archipel.graph.opset import IR_VERSION, OPSET
from archipel.graph.parameters import record_parameters
from archipel.training import step_graph
from archipel.training.driver import StepRunner
from archipel.training.optimizers import adam

STRETCH_LOW, STRETCH_HIGH = -0.1, 1.1  # section 3.2: zeta and gamma
FIRST_EXPONENT, LAST_EXPONENT = 20.0, 2.0  # beta of equation 24
WARM_UP = 0.2  # the share of steps without a penalty
PENALTY = 30.0  # of the mean over all weights, against an error of 1 for the nearest integers
RATE = 0.05

_EIGENVECTORS_UP_TO = 512
_LEFT_OUT = 0.01  # of the sum of eigenvalues


@dataclass(frozen=True)
class Moments:
    """Second moments of a layer's input: `cross` is B [groups, channels, k], `square` C [groups, channels] as above.

    A = F^T F + `rest` I with F = `factor`, [groups, r, k]; `shorter` is (F, rest) of fewer rows that approximates A.
    """

    factor: np.ndarray
    rest: float
    cross: np.ndarray
    square: np.ndarray
    shorter: tuple[np.ndarray, float]

    @classmethod
    def of(cls, read: np.ndarray, exact: np.ndarray, weight: np.ndarray) -> Moments:
        """From the layer's input behind rounded layers (`read`) and in the float network (`exact`), [groups, rows, k].

        `weight` is the float weight. The fewer rows there are for each column, the nearer A comes to a multiple of the
        identity.
        """
        count, k = read.shape[1:]
        # Shrinkage: the ridge adds ridge |W - D|^2 to the error, so that the nearest integers win in directions that
        # few rows show. It goes into A, B and C alike, or the error could fall below 0.
        share = k / (k + count)
        per_row, ridge = (1 - share) / count, share * float(np.square(read).sum(axis=(1, 2)).mean()) / count / k
        outputs = weight @ exact.transpose(0, 2, 1)
        cross = per_row * (outputs @ read) + ridge * weight
        square = per_row * np.square(outputs).sum(axis=2) + ridge * np.square(weight).sum(axis=2)
        # The rows themselves are a factor already, with no more rows than columns.
        if count <= k:
            factor = np.sqrt(per_row) * read
            return cls(factor, ridge, cross, square, (factor, ridge))
        gram = per_row * (read.transpose(0, 2, 1) @ read)
        # Eigenvectors of a large matrix take much longer than its Cholesky factor, which cannot be shortened.
        if k > _EIGENVECTORS_UP_TO:
            # Rounding can leave a singular matrix slightly indefinite, which Cholesky refuses.
            floor = 1e-9 * float(np.trace(gram, axis1=1, axis2=2).max()) * np.eye(k)
            factor = np.linalg.cholesky(gram + floor).transpose(0, 2, 1)
            return cls(factor, ridge, cross, square, (factor, ridge))
        values, vectors = np.linalg.eigh(gram)
        values = np.maximum(values, 0)
        summed = np.cumsum(values.sum(axis=0)) / max(float(values.sum()), 1e-30)
        # The smallest eigenvalues (eigh sorts them ascending), up to _LEFT_OUT of the sum, become their mean, a
        # multiple of the identity. The others lose that mean, so that A stays the same in their directions.
        dropped = int(np.searchsorted(summed, _LEFT_OUT, side="right"))
        mean = float(values[:, :dropped].mean()) if dropped else 0.0
        rows = vectors.transpose(0, 2, 1)
        fewer_rows = np.sqrt(np.maximum(values[:, dropped:] - mean, 0))[:, :, None] * rows[:, dropped:]
        return cls(np.sqrt(values)[:, :, None] * rows, ridge, cross, square, (fewer_rows, ridge + mean))

    def error(self, weight: np.ndarray) -> np.ndarray:
        """Mean squared error of each output channel with this `weight`, [groups, channels, k] -> [groups, channels]."""
        quadratic = np.square(weight @ self.factor.transpose(0, 2, 1)).sum(axis=2)
        error: np.ndarray = quadratic + (weight * (self.rest * weight - 2 * self.cross)).sum(axis=2) + self.square
        return error


def choose_integers(
    weight: np.ndarray, scale: np.ndarray, moments: Moments, levels: int, steps: int
) -> tuple[np.ndarray, float, float]:
    """The integers of `weight` for `scale`, both [groups, channels, k], from -levels - 1 to `levels`.

    Also returns the layer's error with the nearest integers, and with the chosen ones. A channel that training did not
    improve keeps the nearest integers. So do zeros (pruned weights) and the largest weights, which make the scale.
    """
    ratio = weight / scale
    nearest = np.clip(np.round(ratio), -levels - 1, levels)
    below = np.floor(ratio)
    free = (ratio != below) & (np.abs(ratio) < levels - 0.5)
    before = moments.error(nearest * scale)
    if not free.any() or before.sum() <= 0:
        return nearest, float(before.sum()), float(before.sum())
    # A weight that is not free starts at its nearest integer, and `free` multiplies its h with 0.
    trained = _train(ratio - below, np.where(free, below, nearest), free, scale, moments, float(before.sum()), steps)
    candidate = np.where(free, below + (trained > 0.5), nearest)
    after = moments.error(candidate * scale)
    better = (after < before)[:, :, None]
    return np.where(better, candidate, nearest), float(before.sum()), float(np.minimum(before, after).sum())


@dataclass(frozen=True, eq=False)
class _Reconstruction:
    """The loss of h (equation 25): the error of the output, where `unit` counts as 1, plus the penalty.

    The label is [exponent of the penalty, its factor]: both change from step to step, and the graph stays the same.
    """

    below: np.ndarray
    free: np.ndarray
    scale: np.ndarray
    moments: Moments
    unit: float

    def label(self, output: ir.Value) -> tuple[ir.DataType, list[int]]:
        return ir.DataType.FLOAT, [2]

    def values(self, op: Builder, output: ir.Value, label: ir.Value) -> ir.Value:
        def fixed(array: np.ndarray) -> ir.Value:
            return op.constant(array.astype(np.float32))

        weight = op.Mul(op.Add(fixed(self.below), op.Mul(output, fixed(self.free))), fixed(self.scale))
        factor, rest = self.moments.shorter
        linear = op.Sub(op.Mul(weight, rest), fixed(2 * self.moments.cross))
        root = op.MatMul(weight, fixed(factor.transpose(0, 2, 1)))
        error = op.Add(op.ReduceSum(op.Mul(weight, linear), keepdims=0), op.ReduceSum(op.Mul(root, root), keepdims=0))
        error = op.Mul(error, 1 / self.unit)
        exponent, share = op.Gather(label, np.array(0)), op.Gather(label, np.array(1))
        away = op.Abs(op.Sub(op.Mul(output, 2.0), 1.0))
        # 1 - |2h - 1|^beta (equation 24). With a high beta it is flat except near 0 and 1, so that most h follow the
        # error; a low beta pulls every h to its nearer end.
        penalty = op.ReduceMean(op.Sub(1.0, op.Pow(away, exponent)), keepdims=0)
        return op.Add(error, op.Mul(penalty, share))

    def weights(self, op: Builder, output: ir.Value, label: ir.Value) -> None:
        return None

    def correct(self, op: Builder, output: ir.Value, label: ir.Value) -> None:
        return None


def _train(
    fraction: np.ndarray,
    below: np.ndarray,
    free: np.ndarray,
    scale: np.ndarray,
    moments: Moments,
    unit: float,
    steps: int,
) -> np.ndarray:
    """h after `steps` of Adam. It starts at the fraction that rounding down cuts off: with the float weight."""
    height = STRETCH_HIGH - STRETCH_LOW
    # The inverse of the rectified sigmoid. The start keeps off 0 and 1, where the Clip has no gradient.
    share = (np.clip(fraction, 0.01, 0.99) - STRETCH_LOW) / height
    model = _rectified_sigmoid(np.log(share / (1 - share)).astype(np.float32))
    loss = _Reconstruction(below, free.astype(np.float32), scale, moments, unit)
    runner = StepRunner(step_graph(model, loss, adam(RATE), dropout=False))
    warm = int(steps * WARM_UP)
    for step in range(steps):
        progress = max(step - warm, 0) / max(steps - warm, 1)
        exponent = LAST_EXPONENT + (FIRST_EXPONENT - LAST_EXPONENT) * (1 - progress)
        runner.step({"label": np.array([exponent, PENALTY if step >= warm else 0.0], np.float32)})
    logits = runner.tensors["rounding"].astype(np.float64)
    return np.clip(height / (1 + np.exp(-logits)) + STRETCH_LOW, 0, 1)


def _rectified_sigmoid(logits: np.ndarray) -> Model:
    """`rounding` -> h = clip(1.2 sigmoid(V) - 0.1, 0, 1) (equation 23), both in the shape of `logits`."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="adaround")
    op = Builder(graph)
    value = op.initializer("rounding", logits)
    stretched = op.Add(op.Mul(op.Sigmoid(value), STRETCH_HIGH - STRETCH_LOW), STRETCH_LOW)
    op.name_output(op.Clip(stretched, 0.0, 1.0), "h")
    model = ir.Model(graph, ir_version=IR_VERSION)
    record_parameters(model, ["rounding"])
    return Model(model)
