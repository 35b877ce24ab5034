"""A loss to which a strategy adds a term of each example's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from archipel.graph import Builder
from archipel.graph.shapes import rank
from archipel.training.losses import Loss


@dataclass(frozen=True)
class AddedLoss(ABC):
    """loss + strength * `term`. Labels, their weights and what is correct are those of `loss`.

    Of an example with several labels each has the whole term, times its own weight, so that in the mean over the labels
    the term counts as much as the loss.
    """

    loss: Loss
    strength: float

    @abstractmethod
    def term(self, op: Builder, output: ir.Value, label: ir.Value) -> ir.Value:
        """Emit what is added for each example, `[batch]`, in the type of `output`."""

    def label(self, output: ir.Value) -> tuple[ir.DataType, Sequence[int | str]]:
        return self.loss.label(output)

    def values(self, op: Builder, output: ir.Value, label: ir.Value) -> ir.Value:
        values = self.loss.values(op, output, label)
        added = op.Mul(self.term(op, output, label), self.strength)
        if rank(values) > 1:
            added = op.Unsqueeze(added, list(range(1, rank(values))))
        weights = self.weights(op, output, label)
        return op.Add(values, added if weights is None else op.Mul(weights, added))

    def weights(self, op: Builder, output: ir.Value, label: ir.Value) -> ir.Value | None:
        return self.loss.weights(op, output, label)

    def correct(self, op: Builder, output: ir.Value, label: ir.Value) -> ir.Value | None:
        return self.loss.correct(op, output, label)
