"""Less memory for more time: a step's forward pass in parts, which the backward pass computes again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from archipel.autodiff.checkpoint import BATCH, flops_of, mark_best
from archipel.errors import TrainingError
from archipel.training.arguments import whole
from archipel.training.assembly import Assembly


@dataclass(frozen=True)
class Recompute:
    """`budget_bytes` of intermediate values for batches of `batch_size`; None: as few as one recomputation reaches."""

    budget_bytes: int | None
    batch_size: int


def recompute(budget_bytes: int | None = None, batch_size: int = BATCH) -> Recompute:
    """The option `recompute` of a step: how much memory its gradients may need. recompute="auto" means the defaults.

    Arguments:
        budget_bytes: the most bytes of intermediate values that may be alive at once while gradients are computed, 1 or
            more; weights, gradients, state and the batch are not counted. Of the choices within it the one with the
            least work is taken. None: as few bytes as recomputing each value at most once reaches.
        batch_size: the examples of a batch that the choice is made for, where the model takes any number, 1 or more.

    Raises TrainingError for a number out of bounds. `step_graph` raises AutodiffError for a budget that is not reached;
    it names the smallest that is.

    Example:
        step = step_graph(model, losses.cross_entropy(), optimizers.sgd(lr=0.1), recompute=recompute())
    """
    if budget_bytes is not None:
        budget_bytes = whole("recompute", "budget_bytes", budget_bytes, 1)
    return Recompute(budget_bytes, whole("recompute", "batch_size", batch_size, 1))


def check_recompute(option: object) -> None:
    """Raises TrainingError for what is no value of the option."""
    if option is not None and option != "auto" and not isinstance(option, Recompute):
        raise TrainingError(
            f"step_graph: recompute must be None, 'auto' or training.recompute(...), is {option!r}; a budget of bytes "
            "is training.recompute(budget_bytes=...)"
        )


def mark_recomputed(work: Assembly, value: ir.Value, option: Literal["auto"] | Recompute) -> None:
    """Mark what the gradient of `value` with respect to the parameters computes again."""
    chosen = recompute() if option == "auto" else option
    wrt = [str(parameter.name) for parameter in work.parameters]
    work_of = flops_of(work.model, chosen.batch_size)
    mark_best(work.model.ir, [str(value.name)], wrt, chosen.budget_bytes, chosen.batch_size, work_of)
