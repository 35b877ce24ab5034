"""AdaRound: the integers of a layer's weight, chosen by what comes out of the layer (Nagel et al. 2020).

Rounding each weight to its nearest integer is not what changes the layer's output least. Each of them has a variable V
that says by h(V), a rectified sigmoid, how far it is rounded up; V is trained on the error of the output, while a
growing penalty drives h to 0 or 1. The error is written in the second moments of what the layer reads, from which it
follows for all calibration data at once:

    E |W x - D x'|^2 = sum of D (D A) - 2 D B + C,  A = E[x' x'^T], B = W E[x x'^T], C = the diagonal of W E[x x^T] W^T

where x is what the layer reads in the float network and x' what it reads behind rounded layers (section 3.3, eq. 25).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from archipel.compression.quantize.simulation import initializer
from archipel.graph import Builder, Model
from archipel.graph.opset import IR_VERSION, OPSET
from archipel.graph.parameters import record_parameters
from archipel.training import step_graph
from archipel.training.driver import StepRunner
from archipel.training.optimizers import adam

STRETCH_LOW, STRETCH_HIGH = -0.1, 1.1  # section 3.2: zeta and gamma
FIRST_EXPONENT, LAST_EXPONENT = 20.0, 2.0
WARM_UP = 0.2
PENALTY = 30.0
RATE = 0.05


_EIGENVECTORS_UP_TO = 512
_LEFT_OUT = 0.01


@dataclass(frozen=True)
class Moments:
    """Of what a layer reads: B [groups, channels, k] and C [groups, channels] as above, and A = F^T F + `rest`.

    F is `factor`, [groups, r, k]; `shorter` approximates it with few rows where A has few directions.
    """

    factor: np.ndarray
    rest: float
    cross: np.ndarray
    square: np.ndarray
    shorter: tuple[np.ndarray, float]

    @classmethod
    def of(cls, read: np.ndarray, exact: np.ndarray, weight: np.ndarray) -> Moments:
        """From what the layer reads, behind rounded layers and exactly, [groups, rows, k], and its float `weight`.

        A is drawn towards a multiple of the identity the more, the fewer rows there are for each column.
        """
        count, k = read.shape[1:]
        share = k / (k + count)
        kept, ridge = (1 - share) / count, share * float(np.square(read).sum(axis=(1, 2)).mean()) / count / k
        made = weight @ exact.transpose(0, 2, 1)
        cross = kept * (made @ read) + ridge * weight
        square = kept * np.square(made).sum(axis=2) + ridge * np.square(weight).sum(axis=2)
        if count <= k:
            factor = np.sqrt(kept) * read
            return cls(factor, ridge, cross, square, (factor, ridge))
        gram = kept * (read.transpose(0, 2, 1) @ read)
        if k > _EIGENVECTORS_UP_TO:
            floor = 1e-9 * float(np.trace(gram, axis1=1, axis2=2).max()) * np.eye(k)
            factor = np.linalg.cholesky(gram + floor).transpose(0, 2, 1)
            return cls(factor, ridge, cross, square, (factor, ridge))
        values, vectors = np.linalg.eigh(gram)
        values = np.maximum(values, 0)
        summed = np.cumsum(values.sum(axis=0)) / max(float(values.sum()), 1e-30)
        # The smallest eigenvalues count as their mean in each direction.
        left = int(np.searchsorted(summed, _LEFT_OUT, side="right"))
        mean = float(values[:, :left].mean()) if left else 0.0
        rows = vectors.transpose(0, 2, 1)
        short = np.sqrt(np.maximum(values[:, left:] - mean, 0))[:, :, None] * rows[:, left:]
        return cls(np.sqrt(values)[:, :, None] * rows, ridge, cross, square, (short, ridge + mean))

    def error(self, weight: np.ndarray) -> np.ndarray:
        """Mean squared error of each output channel with this `weight`, [groups, channels, k] -> [groups, channels]."""
        made = np.square(weight @ self.factor.transpose(0, 2, 1)).sum(axis=2)
        found: np.ndarray = made + (weight * (self.rest * weight - 2 * self.cross)).sum(axis=2) + self.square
        return found


def chosen_integers(
    weight: np.ndarray, scale: np.ndarray, moments: Moments, levels: int, steps: int
) -> tuple[np.ndarray, float, float]:
    """The integers of `weight` for `scale`, both [groups, channels, k].

    Also the layer's error with the nearest integers, and with these. A channel that training did not make better keeps
    the nearest. So do zeros (pruned weights) and what saturates, from which the scale follows.
    """
    ratio = weight / scale
    nearest = np.clip(np.round(ratio), -levels - 1, levels)
    below = np.floor(ratio)
    free = (ratio != below) & (np.abs(ratio) < levels - 0.5)
    before = moments.error(nearest * scale)
    if not free.any() or before.sum() <= 0:
        return nearest, float(before.sum()), float(before.sum())
    # Where nothing is free h is such that nothing changes.
    trained = _train(ratio - below, np.where(free, below, nearest), free, scale, moments, float(before.sum()), steps)
    candidate = np.where(free, below + (trained > 0.5), nearest)
    after = moments.error(candidate * scale)
    better = (after < before)[:, :, None]
    return np.where(better, candidate, nearest), float(before.sum()), float(np.minimum(before, after).sum())


@dataclass(frozen=True, eq=False)
class _Reconstruction:
    """The loss of `h`; `label` holds the exponent of the penalty and its factor."""

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
        made = op.MatMul(weight, fixed(factor.transpose(0, 2, 1)))
        error = op.Add(op.ReduceSum(op.Mul(weight, linear), keepdims=0), op.ReduceSum(op.Mul(made, made), keepdims=0))
        error = op.Mul(error, 1 / self.unit)
        exponent, share = op.Gather(label, np.array(0)), op.Gather(label, np.array(1))
        away = op.Abs(op.Sub(op.Mul(output, 2.0), 1.0))
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
    """h after training: `steps` of Adam from h = the fraction, so that it starts with the float weight."""
    height = STRETCH_HIGH - STRETCH_LOW
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
    value = initializer(op, "rounding", logits)
    stretched = op.Add(op.Mul(op.Sigmoid(value), STRETCH_HIGH - STRETCH_LOW), STRETCH_LOW)
    op.name_output(op.Clip(stretched, 0.0, 1.0), "h")
    model = ir.Model(graph, ir_version=IR_VERSION)
    record_parameters(model, ["rounding"])
    return Model(model)
