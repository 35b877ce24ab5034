"""Which of a model's versions is the most accurate, by the figures in their model cards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from archipel.bundle import ModelCard
from archipel.bundle.card import BEFORE_COMPRESSION

_LOW = ("loss", "error", "perplexity")
"""In the names of metrics of which less is better."""


class Figure(NamedTuple):
    """What was measured, on which data: figures of two versions compare if both are equal."""

    name: str
    data: str

    def __str__(self) -> str:
        return f"{self.name} on {self.data}"

    @property
    def lower_is_better(self) -> bool:
        """Whether less of it is better, by its name."""
        return any(word in self.name.lower() for word in _LOW)


@dataclass(frozen=True)
class Ranked:
    """A version in its place, and why it has it."""

    number: int
    why: str


def figures(card: ModelCard | None, lineage: Mapping[str, float]) -> dict[Figure, float]:
    """What a version's card says of this version, in the card's order.

    A figure from before compression counts with the accuracy that compression has cost, which `lineage` has where
    validation examples were given (`accuracy_before`, `accuracy_after`); other figures from before it count as unknown.
    """
    found: dict[Figure, float] = {}
    for metric in () if card is None else card.metrics:
        if not metric.data.endswith(BEFORE_COMPRESSION):
            found.setdefault(Figure(metric.name, metric.data), metric.value)
        elif metric.name == "accuracy" and {"accuracy_before", "accuracy_after"} <= set(lineage):
            change = lineage["accuracy_after"] - lineage["accuracy_before"]
            found.setdefault(Figure(metric.name, metric.data.removesuffix(BEFORE_COMPRESSION)), metric.value + change)
    return found


def rank(versions: Sequence[tuple[int, Mapping[Figure, float]]]) -> list[Ranked]:
    """The versions, the most accurate first; equal ones, and those whose cards do not say it, the newest first.

    They are compared by the figure that most of them state; of several, accuracy comes before other figures, and these
    before those of which less is better.

    Arguments:
        versions: number and figures of each, the newest first.
    """
    counts = Counter(figure for _, stated in versions for figure in stated)
    if not counts:
        return [Ranked(number, "the newest; no card states a figure") for number, _ in versions]
    # max takes the first of equal ones: the order of the newest version's card.
    by = max(counts, key=lambda each: (counts[each], each.name == "accuracy", not each.lower_is_better))
    sign = 1 if by.lower_is_better else -1
    # Sorting is stable, so equal ones stay in the order given.
    ordered = sorted(versions, key=lambda each: (by not in each[1], sign * each[1].get(by, 0.0)))
    return [
        Ranked(number, f"{by.name} {stated[by]:.4g} on {by.data}" if by in stated else f"its card states no {by}")
        for number, stated in ordered
    ]
