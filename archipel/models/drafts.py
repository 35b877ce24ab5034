"""The model card of a training: what its configuration says in [card], and what is known without it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from archipel.bundle import CardMetric, ModelCard, encode_card
from archipel.bundle.card import MAX_TEXT
from archipel.errors import CardError


def draft_card(
    fields: Mapping[str, Any],
    *,
    name: str,
    task: str,
    recipe: str,
    metrics: Iterable[CardMetric],
    description: str = "",
    references: Iterable[str] = (),
    parameters: int = 0,
) -> ModelCard:
    """A card of these facts, and of the table [card] of a configuration, which goes before them.

    Arguments:
        fields: any fields of ModelCard but `metrics`, which are measured and not written by hand.
        recipe: the text of the configuration, of which the card has what comes before [card], cut where it is too long.
        name, task, metrics, description, references, parameters: the card's fields of these names.

    Raises CardError for a field that a card does not have, or that is not as it must be.
    """
    if "metrics" in fields:
        raise CardError("card.metrics: are measured by the training; leave them out")
    training = recipe.partition("\n[card]")[0].strip()
    known = {
        "name": name,
        "task": task,
        "description": description or f"A network for {task}.",
        "references": list(references),
        "recipe": training if len(training) <= MAX_TEXT else f"{training[: MAX_TEXT - 4]}\n...",
        "parameters": parameters,
        "metrics": msgspec.to_builtins(list(metrics)),
    }
    try:
        card = msgspec.convert({**known, **fields}, ModelCard)
    except msgspec.ValidationError as error:
        raise CardError(f"card: {error}") from None
    encode_card(card)
    return card
