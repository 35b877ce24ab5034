"""Mixed precision: matrix products and convolutions in float16 with float32 weights (Micikevicius et al. 2018).

The loss is multiplied by a scale before differentiation, so that small gradients do not vanish in float16, and the
gradients are divided by it. Where one of them is not finite the update is skipped and the scale halved; after
`growth_interval` updates in a row the scale doubles (the rule of PyTorch's GradScaler).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from archipel.errors import TrainingError
from archipel.graph.build import Builder
from archipel.graph.passes.constants import EXACT
from archipel.graph.shapes import dtype_of
from archipel.training.arguments import number, whole
from archipel.training.assembly import Assembly
from archipel.training.optimizers import cast

PRODUCTS = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose"})
"""The operators that run in float16. Losses, normalizations and all others stay in the model's own type."""

SCALE, GOOD = "loss_scale", "loss_scale.good_steps"
_LARGEST = 2.0**24


@dataclass(frozen=True)
class Mixed:
    """`scale` is the first loss scale of a device, kept from round to round."""

    scale: float = 2.0**16
    growth_interval: int = 2000


def mixed(scale: float = 2.0**16, growth_interval: int = 2000) -> Mixed:
    """The option `precision` of a step: float16 products with loss scaling. precision="mixed" means the defaults.

    Arguments:
        scale: the first loss scale of a device, from 1 to 2^24.
        growth_interval: updates in a row after which the scale doubles, 1 or more.

    Raises TrainingError for a number out of bounds.

    Example:
        step = step_graph(model, losses.cross_entropy(), optimizers.sgd(lr=0.1), precision=mixed())
    """
    return Mixed(number("mixed", "scale", scale, 1.0, _LARGEST), whole("mixed", "growth_interval", growth_interval, 1))


def autocast(work: Assembly) -> None:
    """Let the model's float32 products run in float16. Parameters stay float32, and so do their gradients.

    Raises TrainingError if there are none.
    """
    op, narrowed = work.op, 0
    for node in list(work.graph):
        if (
            EXACT in node.metadata_props
            or node.domain != ""
            or node.op_type not in PRODUCTS
            or node.outputs[0].dtype != ir.DataType.FLOAT
        ):
            continue
        with op.after(node), op.scope(str(node.name)):
            # The casts are part of the graph, so the gradients of the parameters come back in float32.
            inputs = [None if value is None else op.Cast(value, to=int(ir.DataType.FLOAT16)) for value in node.inputs]
            attributes = {name: attribute.value for name, attribute in node.attributes.items()}
            narrow = op(node.op_type, *inputs, **attributes)
            work.replace(node.outputs[0], op.Cast(narrow, to=int(ir.DataType.FLOAT)))
        narrowed += 1
    if not narrowed:
        raise TrainingError(
            f"precision='mixed': the model has no float32 {', '.join(sorted(PRODUCTS))} to run in float16; "
            "use precision='float32', which leaves the model's types alone"
        )


class LossScale:
    """The loss scale as state of the step. It stays on the device, so that a round starts where the last one ended."""

    def __init__(self, work: Assembly, options: Mixed) -> None:
        self._work = work
        self._options = options
        self._scale = work.scalar_state(SCALE, ir.DataType.FLOAT, options.scale, "device")
        self._good = work.scalar_state(GOOD, ir.DataType.INT64, 0, "device")
        self._finite: ir.Value | None = None

    def seed(self, op: Builder, loss: ir.Value) -> ir.Value:
        """The cotangent of the loss: the scale, in its type."""
        return cast(op, self._scale, dtype_of(loss))

    def unscale(self, op: Builder, gradients: Sequence[ir.Value]) -> list[ir.Value]:
        return [op.Div(gradient, cast(op, self._scale, dtype_of(gradient))) for gradient in gradients]

    def check(self, gradients: Sequence[ir.Value], when: ir.Value | None) -> ir.Value:
        """Whether to update (bool scalar): all gradients are finite, and `when` holds. Makes the next scale an output.

        Where `when` is false (no update is due) the scale stays as it is.
        """
        op = self._work.op
        with op.scope("loss_scale"):
            # The sum is finite if and only if all are, unless it overflows itself, which then costs one step.
            sums = [op.ReduceSum(cast(op, g, ir.DataType.FLOAT), keepdims=0) for g in gradients]
            total = op.Sum(*sums) if len(sums) > 1 else sums[0]
            finite = op.Not(op.Or(op.IsNaN(total), op.IsInf(total)))
            due = finite if when is None else op.And(finite, when)
            skipped = op.Not(finite) if when is None else op.And(op.Not(finite), when)
            good = op.Add(self._good, op.Cast(due, to=int(ir.DataType.INT64)))
            grown = op.Equal(good, self._options.growth_interval)
            up = op.Where(grown, np.array(2.0, np.float32), np.array(1.0, np.float32))
            factor = op.Where(skipped, np.array(0.5, np.float32), up)
            # Below 1 it would make gradients smaller, and without an upper bound it could become infinite.
            scale = op.Clip(op.Mul(self._scale, factor), 1.0, _LARGEST)
            restart = op.Or(grown, skipped)
            self._work.set_next(self._scale, scale)
            self._work.set_next(self._good, op.Where(restart, np.array(0, np.int64), good))
            self._finite = finite
        return due

    def unless_skipped(self, averages: Sequence[tuple[ir.Value, ir.Value]]) -> list[tuple[ir.Value, ir.Value]]:
        """(before, after) of running statistics, which stay as they are in a step whose gradients are not finite."""
        op = self._work.op
        return [(before, op.Where(self._finite, after, before)) for before, after in averages]
