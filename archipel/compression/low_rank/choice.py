"""Choose which layers to split, and their ranks: by energy for each layer, or within a budget for all layers."""

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
_NOTHING = 1e-12  # of energy, so that its logarithm is finite


@dataclass(frozen=True)
class Layer:
    """A layer that can be split, with its present cost: FLOPs for one example, and elements of its weight."""

    name: str
    flops: int
    elements: int
    splits: tuple[Split, ...]
    factors: tuple[Factors, ...]


@dataclass(frozen=True)
class Choice:
    """A split of a layer by number, its rank, its cost, and the share of energy that is lost."""

    split: int
    rank: int
    flops: float
    elements: int
    lost: float


def by_energy(layer: Layer, energy: float) -> Choice | None:
    """The split with the fewest FLOPs, each at the lowest rank that keeps `energy`; None where no split saves FLOPs."""
    choices = []
    for number, factors in enumerate(layer.factors):
        rank = max(int(np.argmax(factors.energy >= energy - _ROUNDING)), 1)
        choices.append(_choice(layer, number, rank))
    saving = [choice for choice in choices if choice.flops < layer.flops and choice.elements <= layer.elements]
    return min(saving, key=lambda choice: choice.flops, default=None)


def by_budget(layers: Sequence[Layer], unit: Unit, most: float) -> list[Choice | None]:
    """For each layer a choice, or None to leave it, so that together they cost at most `most` and lose little energy.

    The goal is the product of all layers' energies (rank selection of Zhang et al. 2016), so that no layer is emptied
    for the sake of others. This is Lagrangian relaxation: with a price on each FLOP (or element) every layer takes the
    option with the least -log(energy) + price * cost, and bisection finds the price at which the budget is met. What
    the budget leaves over goes to the options that gain most per cost. Raises CompressionError if the lowest ranks cost
    too much.
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

    def picks_at(price: float) -> list[int]:
        # lexsort: of equal options the cheapest.
        return [int(np.lexsort((cost, loss + price * cost))[0]) for cost, loss in zip(costs, losses)]

    def total(picks: Sequence[int]) -> float:
        return sum(float(cost[pick]) for cost, pick in zip(costs, picks))

    # At the high end even the smallest saving of cost outweighs any loss: every layer takes its cheapest option.
    low, high = 0.0, 2.0 * (1.0 - np.log(_NOTHING)) / max(min(_gaps(costs)), 1e-12)
    for _ in range(_BISECTIONS):
        # Geometric, as prices range over many orders of magnitude.
        middle = np.sqrt(max(low, high * 1e-12) * high)
        low, high = (low, middle) if total(picks_at(middle)) <= most else (middle, high)
    picks = picks_at(high)
    while True:
        # A price reaches only options on the convex hull; greedily upgrade single layers within the budget.
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
    """None (the layer as it is), and every rank of every split that saves in `unit` and costs no more otherwise."""
    options: list[Choice | None] = [None]
    for number, factors in enumerate(layer.factors):
        for rank in range(1, len(factors.values) + 1):
            choice = _choice(layer, number, rank)
            fits = choice.flops <= layer.flops and choice.elements <= layer.elements
            if fits and _cost(layer, choice, unit) < _cost(layer, None, unit):
                options.append(choice)
    return options


def _choice(layer: Layer, number: int, rank: int) -> Choice:
    split = layer.splits[number]
    lost = 1.0 - float(layer.factors[number].energy[rank])
    return Choice(number, rank, split.flops * rank, split.elements * rank, lost)


def _cost(layer: Layer, choice: Choice | None, unit: Unit) -> float:
    if unit == "flops":
        return float(layer.flops if choice is None else choice.flops)
    return float(layer.elements if choice is None else choice.elements)


def _gaps(costs: Sequence[np.ndarray]) -> list[float]:
    """The smallest difference of cost in each layer with several options: no price must distinguish smaller ones."""
    gaps = [float(np.min(np.diff(np.unique(cost)))) for cost in costs if len(np.unique(cost)) > 1]
    return gaps or [1.0]
