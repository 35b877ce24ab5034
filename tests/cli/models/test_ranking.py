"""The order of a model's versions by the figures in their cards; what is expected was written by hand."""

from __future__ import annotations

import pytest

from archipel.bundle import CardMetric, ModelCard
from archipel.cli.models.ranking import Figure, figures, rank

BEFORE = ", before compression"


def card(*metrics: tuple[str, float, str]) -> ModelCard:
    return ModelCard(
        name="digits", description="Digits.", task="image classification",
        metrics=tuple(CardMetric(name=name, value=value, data=data, examples=100) for name, value, data in metrics),
    )  # fmt: skip


COST = {"accuracy_before": 0.95, "accuracy_after": 0.92}


@pytest.mark.parametrize(
    ("versions", "expected", "why"),
    [
        # The oldest is the best; of two equal ones the newer comes first.
        ([(card(("accuracy", 0.8, "t")), {}), (card(("accuracy", 0.7, "t")), {}), (card(("accuracy", 0.8, "t")), {})],
         [3, 1, 2], "accuracy 0.8 on t"),
        ([(card(("accuracy", 0.7, "t")), {}), (card(("accuracy", 0.8, "t")), {}), (card(("accuracy", 0.9, "t")), {})],
         [1, 2, 3], "accuracy 0.9 on t"),
        # Of a loss less is better, also where only a part of the versions has an accuracy.
        ([(card(("loss", 1.9, "t")), {}), (card(("loss", 1.7, "t"), ("accuracy", 0.1, "t")), {})], [1, 2],
         "loss 1.7 on t"),
        # Both are stated by all: accuracy decides, though the loss says otherwise and comes first in the cards.
        ([(card(("loss", 0.3, "t"), ("accuracy", 0.9, "t")), {}),
          (card(("loss", 0.2, "t"), ("accuracy", 0.8, "t")), {})], [2, 1], "accuracy 0.9 on t"),
        # A figure on other data does not compare: most state t.
        ([(card(("accuracy", 0.99, "easy")), {}), (card(("accuracy", 0.7, "t")), {}),
          (card(("accuracy", 0.8, "t")), {})], [1, 2, 3], "accuracy 0.8 on t"),
        # Compressed: 0.97 - 0.03 is below the float model's own 0.945, above 0.93; unknown without a measurement.
        ([(card(("accuracy", 0.97, "t" + BEFORE)), COST), (card(("accuracy", 0.945, "t")), {}),
          (card(("accuracy", 0.93, "t")), {}), (card(("accuracy", 0.99, "t" + BEFORE)), {})], [3, 4, 2, 1],
         "accuracy 0.945 on t"),
        ([(None, {}), (card(("accuracy", 0.5, "t")), {})], [1, 2], "accuracy 0.5 on t"),
        ([(None, {}), (card(), {})], [2, 1], "the newest; no card states a figure"),
    ],
)  # fmt: skip
def test_the_most_accurate_first(
    versions: list[tuple[ModelCard | None, dict[str, float]]], expected: list[int], why: str
) -> None:
    """Version 1 is the last of the list, as a server gives them."""
    given = [(len(versions) - i, figures(*each)) for i, each in enumerate(versions)]
    found = rank(given)
    assert [each.number for each in found] == expected
    assert found[0].why == why


def test_a_card_that_does_not_say_it() -> None:
    found = rank([(2, {}), (1, {Figure("accuracy", "t"): 0.5})])
    assert [each.why for each in found] == ["accuracy 0.5 on t", "its card states no accuracy on t"]
