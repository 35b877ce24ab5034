"""PruneNM: of every m consecutive weights along the input channels n stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import numpy as np

from archipel.compression.arguments import check_choices
from archipel.compression.compressed import CompressedModel
from archipel.compression.fine_tune import FineTune
from archipel.compression.layer_weights import LayerWeight, choose_weights, layer_weights, refuse_quantized
from archipel.compression.masks.apply import write_masks
from archipel.compression.masks.report import facts
from archipel.compression.masks.scores import Criterion, scores
from archipel.compression.part import Need
from archipel.compression.work import Work
from archipel.errors import CompressionError


@dataclass(frozen=True)
class PruneNM:
    """Keep the `n` most important of every `m` consecutive weights along the input channels (Mishra et al. 2021).

    Sparse tensor cores multiply 2:4. Groups lie along the axis that the layer sums over: axis 1 of Conv, the rows of
    MatMul, the columns of PyTorch's Linear; a shorter last group keeps `n` as well. A weight whose axis is shorter than
    `m` (a first layer of 3 channels, a depthwise Conv) stays dense. Earlier masks stay.

    Arguments:
        criterion: as in `PruneWeights`.
        exclude: globs of names of parameters that stay dense.
        fine_tune: training after the pruning; None: none.

    Raises CompressionError for a field out of range; from `apply` where no weight has a long enough axis.

    Example:
        sparse, report = archipel.compress(model, [PruneNM(2, 4)], data=data)
    """

    n: int = 2
    m: int = 4
    criterion: Criterion = "l1"
    exclude: tuple[str, ...] = ()
    fine_tune: FineTune | None = None

    def __post_init__(self) -> None:
        integers = all(isinstance(value, int) and not isinstance(value, bool) for value in (self.n, self.m))
        if not integers or not 0 < self.n < self.m:
            raise CompressionError(f"PruneNM: n and m must be whole numbers with 0 < n < m, are {self.n!r}, {self.m!r}")
        check_choices(self, criterion=get_args(Criterion))

    @property
    def needs(self) -> tuple[Need, ...]:
        return ("data",) if self.criterion == "taylor" or self.fine_tune is not None else ()

    def apply(self, model: CompressedModel, work: Work) -> CompressedModel:
        refuse_quantized(model, "PruneNM")
        result = CompressedModel.of(model)
        dense: dict[str, str] = {}
        weights = []
        for weight in choose_weights(layer_weights(result), "PruneNM", "*", self.exclude):
            if reason := self._unfit(weight):
                dense[weight.name] = reason
            else:
                weights.append(weight)
        if not weights:
            raise CompressionError(f"PruneNM: no weight can be pruned {self.n}:{self.m}: {dense or 'all are excluded'}")
        importance = scores(self.criterion, result, weights, work, self)
        masks = {w.name: pattern(importance[w.name], w.axis or 0, self.n, self.m) & w.kept for w in weights}
        result = write_masks(result, masks)
        if self.fine_tune is not None:
            result = work.train(result, self.fine_tune)
        work.note(dense=dense, **facts(model, result))
        return result

    def _unfit(self, weight: LayerWeight) -> str:
        if weight.axis is None:
            return "its axis of input channels is not known, or its readers differ in it"
        size = weight.kept.shape[weight.axis]
        return f"{size} input channels, fewer than m" if size < self.m else ""


def pattern(importance: np.ndarray, axis: int, n: int, m: int) -> np.ndarray:
    """bool in the shape of `importance`: true for the `n` largest of every `m` consecutive ones along `axis`."""
    moved = np.moveaxis(importance, axis, -1)
    size = moved.shape[-1]
    missing = -size % m
    padded = np.pad(moved, [(0, 0)] * (moved.ndim - 1) + [(0, missing)], constant_values=-np.inf)
    groups = padded.reshape(*moved.shape[:-1], -1, m)
    # The second argsort turns the order into ranks. Stable: of equal weights the first stay; padding comes last.
    place = np.argsort(np.argsort(-groups, axis=-1, kind="stable"), axis=-1, kind="stable")
    kept = (place < n).reshape(padded.shape)[..., :size]
    return np.moveaxis(kept, -1, axis)
