"""Which layers become thinner, and how thin: by energy for each layer, or within a budget for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from archipel.compression.low_rank.factors import Factors
from archipel.compression.low_rank.splits import Split
from archipel.errors import CompressionError

Unit = Literal["flops", "size"]
_ROUNDING = 1e-12  # of the sum of squares in float64
_BISECTIONS = 200
_NOTHING = 1e-12  # of energy


@dataclass(frozen=True)
class Layer:
    """A layer that can be split, with what it takes as it is: FLOPs of one example, and elements of its weight."""

    name: str
    flops: int
    elements: int
    splits: tuple[Split, ...]
    factors: tuple[Factors, ...]


@dataclass(frozen=True)
class Choice:
    """What a layer becomes: number of the split, rank, and the energy that is lost."""

    split: int
    rank: int
    flops: float
    elements: int
    lost: float


def by_energy(layer: Layer, energy: float) -> Choice | None:
    """The cheapest split in FLOPs among the lowest ranks that keep `energy`; None where that saves nothing."""
    found = []
    for number, factors in enumerate(layer.factors):
        rank = max(int(np.argmax(factors.energy >= energy - _ROUNDING)), 1)
        found.append(_choice(layer, number, rank))
    saving = [choice for choice in found if choice.flops < layer.flops and choice.elements <= layer.elements]
    return min(saving, key=lambda choice: choice.flops, default=None)


def by_budget(layers: Sequence[Layer], unit: Unit, most: float) -> list[Choice | None]:
    """For each layer a choice, or None to leave it, so that together they take `most` and lose little energy.

    What is kept is the product of all layers' energies (rank selection of Zhang et al. 2016), so no layer is emptied
    for the sake of others. A price on each FLOP (or element) decides: every layer takes the option with the least
    -log(energy) + price * cost, which walks along the convex hulls of all layers by energy per FLOP saved; what the
    budget leaves over is given back where it helps most. Raises CompressionError if the lowest ranks take too much.
    """
    tables = [_options(layer, unit) for layer in layers]
    costs = [np.array([_cost(layer, choice, unit) for choice in table]) for layer, table in zip(layers, tables)]
    losses = [np.array([0.0 if c is None else -np.log(max(1.0 - c.lost, _NOTHING)) for c in table]) for table in tables]
    least = sum(float(cost.min()) for cost in costs)
    if least > most:
        raise CompressionError(
            f"LowRank: with rank 1 in every layer that can be split {least:.4g} {_NAMES[unit]} remain of "
            f"{sum(float(cost[0]) for cost in costs):.4g}, and the target leaves {most:.4g} for them"
        )

    def taken(price: float) -> list[int]:
        return [int(np.lexsort((cost, loss + price * cost))[0]) for cost, loss in zip(costs, losses)]

    def total(picks: Sequence[int]) -> float:
        return sum(float(cost[pick]) for cost, pick in zip(costs, picks))

    low, high = 0.0, 2.0 * (1.0 - np.log(_NOTHING)) / max(min(_gaps(costs)), 1e-12)
    for _ in range(_BISECTIONS):
        middle = np.sqrt(max(low, high * 1e-12) * high)
        low, high = (low, middle) if total(taken(middle)) <= most else (middle, high)
    picks = taken(high)
    while True:
        slack = most - total(picks)
        better = [
            (float((losses[i][pick] - losses[i][other]) / max(costs[i][other] - costs[i][pick], 1e-12)), i, int(other))
            for i, pick in enumerate(picks)
            for other in np.flatnonzero((losses[i] < losses[i][pick]) & (costs[i] - costs[i][pick] <= slack))
        ]
        if not better:
            return [table[pick] for table, pick in zip(tables, picks)]
        _, layer, option = max(better)
        picks[layer] = option


_NAMES = {"flops": "FLOPs", "size": "elements of weights"}


def _options(layer: Layer, unit: Unit) -> list[Choice | None]:
    """The layer as it is, and every rank of every split that saves in `unit` and takes no more otherwise."""
    found: list[Choice | None] = [None]
    for number, factors in enumerate(layer.factors):
        for rank in range(1, len(factors.values) + 1):
            choice = _choice(layer, number, rank)
            fits = choice.flops <= layer.flops and choice.elements <= layer.elements
            if fits and _cost(layer, choice, unit) < _cost(layer, None, unit):
                found.append(choice)
    return found


def _choice(layer: Layer, number: int, rank: int) -> Choice:
    split = layer.splits[number]
    lost = 1.0 - float(layer.factors[number].energy[rank])
    return Choice(number, rank, split.flops * rank, split.elements * rank, lost)


def _cost(layer: Layer, choice: Choice | None, unit: Unit) -> float:
    if unit == "flops":
        return float(layer.flops if choice is None else choice.flops)
    return float(layer.elements if choice is None else choice.elements)


def _gaps(costs: Sequence[np.ndarray]) -> list[float]:
    """The smallest differences of cost in each layer: no price needs to tell smaller ones apart."""
    found = [float(np.min(np.diff(np.unique(cost)))) for cost in costs if len(np.unique(cost)) > 1]
    return found or [1.0]
