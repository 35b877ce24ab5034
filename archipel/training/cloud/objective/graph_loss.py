"""A loss of `archipel.training.losses` on tensors: its own graph, lowered to PyTorch, so that it means the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from archipel.errors import TrainingError
from archipel.graph.build import Builder
from archipel.graph.model import Model
from archipel.graph.opset import IR_VERSION, OPSET
from archipel.graph.passes import optimize
from archipel.training.losses import CrossEntropy, Loss, counted, objective, total

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Sums:
    """A loss over a batch: sums, so that batches of any size can be added up.

    total    of the labels' weighted losses
    weight   of the labels' weights; their mean loss is total / weight
    right    how many predictions were right; None for a loss of no classification
    counted  how many labels have a weight other than 0
    """

    total: torch.Tensor
    weight: torch.Tensor
    right: torch.Tensor | None
    counted: torch.Tensor


@dataclass(frozen=True)
class _Lowered:
    label_type: torch.dtype
    label_sizes: tuple[int | str, ...]
    objective: Callable[..., Any]
    sums: Callable[..., Any]
    weighted: bool


class GraphLoss:
    """One loss, lowered once for each type and rank of outputs that it meets.

    Arguments:
        loss: one of training.losses.
        name: what errors call the output.
    """

    def __init__(self, loss: Loss, name: str) -> None:
        self.loss = loss
        self.name = name
        self._lowered: dict[tuple[Any, ...], _Lowered] = {}

    def mean(self, output: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | int]:
        """The weighted mean over all labels, a scalar to minimize, and the sum of their weights."""
        lowered = self._lower(output, label)
        if lowered.weighted:
            value, weight = lowered.objective(output, label)
            return value, weight
        return lowered.objective(output, label), self._labels(output, lowered)

    def sums(self, output: torch.Tensor, label: torch.Tensor) -> Sums:
        """See Sums."""
        results = self._lower(output, label).sums(output, label)
        return Sums(results[0], results[1], results[3] if len(results) == 4 else None, results[2])

    def label_weight(self, label: torch.Tensor) -> torch.Tensor | None:
        """The sum of the labels' weights before there are outputs, a float64 scalar; None where all are 1.

        A part of a batch needs it for its share of the whole: parts may have different numbers of labels that count.
        """
        import torch

        if not isinstance(self.loss, CrossEntropy):
            return None
        ignored, table = self.loss.ignore_index, self.loss.class_weights
        if ignored is None and table is None:
            return None
        counts = torch.ones_like(label, dtype=torch.bool) if ignored is None else label != ignored
        if table is None:
            return counts.sum(dtype=torch.float64)
        weights = torch.tensor(table, dtype=torch.float64, device=label.device)
        return weights[torch.where(counts, label, 0).long()].mul(counts).sum()

    def label_type(self, output: torch.Tensor) -> torch.dtype:
        """The type that labels of this output have."""
        return self._for(output).label_type

    def classes(self, output: torch.Tensor) -> int | None:
        """How many classes the output has; None for a loss that is no cross entropy of class numbers."""
        return output.shape[self.loss.axis] if isinstance(self.loss, CrossEntropy) else None

    def wrong_label(self, output: torch.Tensor, labels: NDArray[Any]) -> int | None:
        """The first of the class numbers, as they were read, that is none of the output's classes; None for none."""
        self._for(output)  # says first if the loss does not fit the output at all
        classes = self.classes(output)
        # Two reductions first, and the search only where they find something.
        if classes is None or labels.size == 0 or labels.dtype.kind not in "iu":
            return None
        if labels.min() >= 0 and labels.max() < classes:
            return None
        wrong = labels[(labels < 0) | (labels >= classes)]
        if (ignored := self.ignored) is not None:
            wrong = wrong[wrong != ignored]
        return int(wrong[0]) if wrong.size else None

    @property
    def ignored(self) -> int | None:
        """The label that does not count."""
        return getattr(self.loss, "ignore_index", None)

    def _labels(self, output: torch.Tensor, lowered: _Lowered) -> int:
        if isinstance(self.loss, CrossEntropy) or len(lowered.label_sizes) < output.ndim:
            return int(output.numel() // output.shape[getattr(self.loss, "axis", 1)])
        return output.numel()

    def _lower(self, output: torch.Tensor, label: torch.Tensor) -> _Lowered:
        lowered = self._for(output)
        sizes = {f"d{axis}": size for axis, size in enumerate(output.shape)}
        expected = [sizes[size] if isinstance(size, str) else size for size in lowered.label_sizes]
        if list(label.shape) != expected:
            # Refused, because broadcasting [n, 1] against [n] would compare every prediction with every label.
            raise TrainingError(
                f"the loss of {self.name} has outputs of the shape {list(output.shape)} and needs labels of the shape "
                f"{expected}, got {list(label.shape)}; reshape the labels or let the model return another shape"
            )
        return lowered

    def _for(self, output: torch.Tensor) -> _Lowered:
        fixed = [output.shape[axis] for axis in self._fixed(output.ndim)]
        key = (output.device, output.dtype, output.ndim, *fixed)
        lowered = self._lowered.get(key)
        if lowered is None:
            lowered = self._lowered[key] = self._build(output)
        return lowered

    def _fixed(self, rank: int) -> list[int]:
        """The axes whose size the loss looks at: that of the classes, and the last one for pos_weight."""
        axes = [getattr(self.loss, "axis", None), -1 if hasattr(self.loss, "pos_weight") else None]
        return [axis % rank for axis in axes if axis is not None and -rank <= axis < rank]

    def _build(self, output: torch.Tensor) -> _Lowered:
        import torch

        from archipel.training.cloud.graphs.torch_module import TorchModule

        dtype = {torch.float32: ir.DataType.FLOAT, torch.float64: ir.DataType.DOUBLE}.get(output.dtype)
        if dtype is None:
            raise TrainingError(
                f"the loss of {self.name} needs an output of floating-point numbers, got {output.dtype}"
            )
        fixed = self._fixed(output.ndim)
        sizes = [size if axis in fixed else f"d{axis}" for axis, size in enumerate(output.shape)]
        step, label = _start(self.loss, dtype, sizes, self.name)
        weights = self.loss.weights(*step)
        outputs = [objective(step[0], self.loss, step[1], step[2])]
        if weights is not None:
            outputs.append(total(step[0], weights))
        measure, _ = _start(self.loss, dtype, sizes, self.name)
        sums = _sums(self.loss, *measure)
        return _Lowered(
            label_type=torch.from_numpy(np.zeros(0, label[0].numpy())).dtype,
            label_sizes=tuple(label[1]),
            objective=TorchModule(_finish(step[0], outputs)).to(output.device),
            sums=TorchModule(_finish(measure[0], sums)).to(output.device),
            weighted=weights is not None,
        )


Label = tuple[ir.DataType, Sequence[int | str]]


def _start(
    loss: Loss, dtype: ir.DataType, sizes: Sequence[int | str], name: str
) -> tuple[tuple[Builder, ir.Value, ir.Value], Label]:
    op = Builder(ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="loss"))
    output = op.input(name, dtype, sizes)
    label = loss.label(output)
    return (op, output, op.input("label" if name != "label" else "target", *label)), label


def _sums(loss: Loss, op: Builder, output: ir.Value, label: ir.Value) -> list[ir.Value]:
    values, weights = loss.values(op, output, label), loss.weights(op, output, label)
    count = counted(op, values, weights)
    weight = count if weights is None else total(op, weights)
    correct = loss.correct(op, output, label)
    right = [] if correct is None else [total(op, op.Cast(correct, to=int(ir.DataType.INT64)))]
    return [total(op, values), weight, count, *right]


def _finish(op: Builder, outputs: Sequence[ir.Value]) -> Model:
    for index, value in enumerate(outputs):
        op.name_output(value, f"result{index}")
    model = ir.Model(op.graph, ir_version=IR_VERSION)
    optimize(model)
    return Model(model)
