"""PruneWeights: set the least important single weights to zero, at once or in steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from archipel.compression.arguments import check_choices, check_whole
from archipel.compression.compressed import CompressedModel
from archipel.compression.fine_tune import FineTune
from archipel.compression.layer_weights import LayerWeight, choose_weights, layer_weights, refuse_quantized
from archipel.compression.masks.apply import sparsity, write_masks
from archipel.compression.masks.report import facts
from archipel.compression.masks.scores import Criterion, scores
from archipel.compression.part import Need
from archipel.compression.work import Work
from archipel.errors import CompressionError

Scope = Literal["global", "layer"]

_LEAST = 0.1
"""The least share of a layer's weights that scope "global" keeps, of what "layer" would keep: without a floor a single
threshold may empty a layer, and so cut the network (Tanaka et al. 2020)."""


@dataclass(frozen=True)
class PruneWeights:
    """Set the share `sparsity` of the weights of Conv, ConvTranspose, Gemm, MatMul, LSTM and GRU to zero.

    Masks stay in the graph, so all later training keeps the zeros. Devices get plain weights with zeros in them, which
    deflate well and run no faster. Biases, normalizations and embeddings are never masked.

    Arguments:
        sparsity: of the result; a model with masks gets sparser ones.
        criterion: "l1" removes the smallest weights (Han et al. 2015), "taylor" those that change the loss least, by
            gradients over training data. In a fully trained network these are nearly 0: use "l1" there.
        scope: "global": one threshold for all layers; "layer": each layer loses the same share.
        iterations: steps with `fine_tune` after each, by the cubic schedule of Zhu & Gupta 2017 (equation 1).
        exclude: globs of names of parameters that stay dense.

    Raises CompressionError for a field out of range; from `apply` for a model that is quantized or sparser already.

    Example:
        sparse, report = archipel.compress(model, [PruneWeights(0.5)], data=data)
    """

    sparsity: float = 0.8
    criterion: Criterion = "l1"
    scope: Scope = "global"
    iterations: int = 1
    exclude: tuple[str, ...] = ()
    fine_tune: FineTune | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.sparsity < 1.0:
            raise CompressionError(f"PruneWeights: sparsity must be above 0 and below 1, is {self.sparsity!r}")
        check_choices(self, criterion=get_args(Criterion), scope=get_args(Scope))
        check_whole(self, "iterations")
        if self.iterations > 1 and self.fine_tune is None:
            raise CompressionError(
                f"PruneWeights: {self.iterations} iterations do nothing that one does not unless the model is trained "
                "between them; give fine_tune=FineTune(...)"
            )

    @property
    def needs(self) -> tuple[Need, ...]:
        return ("data",) if self.criterion == "taylor" or self.fine_tune is not None else ()

    def apply(self, model: CompressedModel, work: Work) -> CompressedModel:
        refuse_quantized(model, "PruneWeights")
        result = CompressedModel.of(model)
        weights = self._weights(result)
        initial = sparsity(weights)
        if initial > self.sparsity:
            raise CompressionError(
                f"PruneWeights: {initial:.1%} of the weights are masked already, more than sparsity={self.sparsity:g}"
            )
        for done in range(1, self.iterations + 1):
            # From the present sparsity: most weights go in the first steps, while there are many to spare.
            target = self.sparsity + (initial - self.sparsity) * (1.0 - done / self.iterations) ** 3
            weights = self._weights(result)
            importance = scores(self.criterion, result, weights, work, self)
            result = write_masks(result, masks(weights, importance, target, self.scope))
            if self.fine_tune is not None:
                result = work.train(result, self.fine_tune, what=f"fine-tuning at {target:.0%} zeros")
            work.progress(done, self.iterations, f"pruning weights, {target:.0%} zeros")
        work.note(**facts(model, result))
        return result

    def _weights(self, model: CompressedModel) -> list[LayerWeight]:
        weights = choose_weights(layer_weights(model), "PruneWeights", "*", self.exclude)
        if not weights:
            raise CompressionError(f"PruneWeights: exclude={self.exclude!r} leaves no weights to prune")
        return weights


def masks(
    weights: Sequence[LayerWeight], importance: Mapping[str, np.ndarray], target: float, scope: Scope
) -> dict[str, np.ndarray]:
    """Masks (true: kept) with the share `target` of zeros, where `importance` is smallest.

    Weights that are masked already (-1) go first, so the zeros of earlier masks stay.
    """
    if scope == "layer":
        return {weight.name: _without_least(importance[weight.name], target) for weight in weights}
    flat = np.concatenate([_protect(importance[weight.name].ravel(), target) for weight in weights])
    kept = _without_least(flat, target)
    ends = np.cumsum([importance[weight.name].size for weight in weights])
    parts = np.split(kept, ends[:-1])
    return {weight.name: part.reshape(importance[weight.name].shape) for weight, part in zip(weights, parts)}


def _without_least(importance: np.ndarray, share: float) -> np.ndarray:
    kept = np.ones(importance.size, bool)
    gone = round(share * importance.size)
    kept[np.argsort(importance, axis=None, kind="stable")[:gone]] = False
    return kept.reshape(importance.shape)


def _protect(importance: np.ndarray, target: float) -> np.ndarray:
    """The importance of a layer's weights, infinite for those that stay whatever the threshold."""
    least = max(int(_LEAST * (1.0 - target) * importance.size), 1)
    result = importance.copy()
    top = np.argpartition(importance, importance.size - least)[importance.size - least :]
    # A masked weight is never among those that stay.
    result[top] = np.where(importance[top] < 0, importance[top], np.inf)
    return result
