"""PruneWeights: the least important single weights become zero, all at once or little by little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from archipel.compression.compressed import CompressedModel
from archipel.compression.fine_tune import FineTune
from archipel.compression.layer_weights import LayerWeight, chosen, layer_weights, refuse_quantized
from archipel.compression.masks.apply import sparsity, write_masks
from archipel.compression.masks.report import facts
from archipel.compression.masks.scores import Criterion, scores
from archipel.compression.part import Need
from archipel.compression.work import Work
from archipel.errors import CompressionError

Scope = Literal["global", "layer"]

_LEAST = 0.1
"""What a layer keeps at least under scope "global", of what it would keep under "layer": without a floor a single
threshold may empty a layer and with it cut the network (Tanaka et al. 2020)."""


@dataclass(frozen=True)
class PruneWeights:
    """Set the share `sparsity` of the weights of Conv, ConvTranspose, Gemm, MatMul, LSTM and GRU to zero.

    `criterion` "l1" takes the smallest (Han et al. 2015), "taylor" those that change the loss least, from gradients
    over training data (`masks.scores`): those are nearly 0 everywhere in a network that has been trained to its end,
    where "l1" is the better choice. With `scope` "global" one threshold holds for all layers, with "layer" each
    loses the same share. `iterations` goes there in that many steps with `fine_tune` after each, by the cubic schedule
    of Zhu & Gupta 2017 (equation 1). `exclude` has globs of parameter names that stay dense. Biases, normalizations
    and embeddings are never masked. A model with masks gets sparser ones: `sparsity` is that of the result.

    Masks stay in the graph, so all later training keeps the zeros; what is deployed has plain weights with zeros in
    them, that compress well and run no faster.
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
        for name, allowed in (("criterion", get_args(Criterion)), ("scope", get_args(Scope))):
            if getattr(self, name) not in allowed:
                raise CompressionError(f"PruneWeights: {name} is one of {allowed}, got {getattr(self, name)!r}")
        if isinstance(self.iterations, bool) or not isinstance(self.iterations, int) or self.iterations < 1:
            raise CompressionError(f"PruneWeights: iterations must be a whole number from 1, is {self.iterations!r}")
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
        first = sparsity(weights)
        if first > self.sparsity:
            raise CompressionError(
                f"PruneWeights: {first:.1%} of the weights are masked already, more than sparsity={self.sparsity:g}"
            )
        for done in range(1, self.iterations + 1):
            target = self.sparsity + (first - self.sparsity) * (1.0 - done / self.iterations) ** 3
            weights = self._weights(result)
            found = scores(self.criterion, result, weights, work, self)
            result = write_masks(result, masks(weights, found, target, self.scope))
            if self.fine_tune is not None:
                result = work.train(result, self.fine_tune, what=f"fine-tuning at {target:.0%} zeros")
            work.progress(done, self.iterations, f"pruning weights, {target:.0%} zeros")
        work.note(**facts(model, result))
        return result

    def _weights(self, model: CompressedModel) -> list[LayerWeight]:
        found = chosen(layer_weights(model), "PruneWeights", "*", self.exclude)
        if not found:
            raise CompressionError(f"PruneWeights: exclude={self.exclude!r} leaves no weights to prune")
        return found


def masks(
    weights: Sequence[LayerWeight], found: Mapping[str, np.ndarray], target: float, scope: Scope
) -> dict[str, np.ndarray]:
    """Masks (true: kept) with the share `target` of zeros, where `found` is smallest.

    What is masked already (scored -1) goes first, so masks only grow.
    """
    if scope == "layer":
        return {weight.name: _without_least(found[weight.name], target) for weight in weights}
    flat = np.concatenate([_protected(found[weight.name].ravel(), target) for weight in weights])
    kept = _without_least(flat, target)
    ends = np.cumsum([found[weight.name].size for weight in weights])
    parts = np.split(kept, ends[:-1])
    return {weight.name: part.reshape(found[weight.name].shape) for weight, part in zip(weights, parts)}


def _without_least(found: np.ndarray, share: float) -> np.ndarray:
    kept = np.ones(found.size, bool)
    gone = round(share * found.size)
    kept[np.argsort(found, axis=None, kind="stable")[:gone]] = False
    return kept.reshape(found.shape)


def _protected(found: np.ndarray, target: float) -> np.ndarray:
    least = max(int(_LEAST * (1.0 - target) * found.size), 1)
    result = found.copy()
    top = np.argpartition(found, found.size - least)[found.size - least :]
    result[top] = np.where(found[top] < 0, found[top], np.inf)
    return result
