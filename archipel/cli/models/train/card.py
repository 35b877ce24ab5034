"""The model card that `archipel train` writes with the model: [card] of the file, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from archipel.bundle import CardMetric, ModelCard
from archipel.cli.models.train.data import Data
from archipel.cli.models.train.job import Job
from archipel.models.catalogue import CATALOGUE
from archipel.models.drafts import draft_card


def make_card(
    job: Job,
    file: Path,
    settings: Sequence[str] = (),
    *,
    data: Data | None = None,
    validated: Mapping[str, float] | None = None,
    tested: Mapping[str, float] | None = None,
    parameters: int = 0,
) -> ModelCard:
    """The card of a training; without results, to see whether [card] is right before it begins.

    Arguments:
        job: what `read_job` made of the file.
        file: the configuration.
        settings: what --set has put in its place.
        data: what was read.
        validated: the metrics of the validation data in the best epoch.
        tested: those of the test data, which the card has in place of these where they are there.
        parameters: how many numbers were trained.

    Raises CardError that names the field.
    """
    kind, source = job.model.source
    network = CATALOGUE.get(source) if kind == "zoo" else None
    # Without folders: a card is published, and where somebody's data lie is nobody's business.
    told = [setting for setting in settings if not setting.strip().startswith(("data.", "output."))]
    command = " ".join(["archipel train", file.name, *(f"--set {setting}" for setting in told)])
    use, found = ("test", tested) if tested else ("validation", validated)
    metrics: list[CardMetric] = []
    if found and data is not None:
        examples = _count(getattr(data, use))
        where = _name(job, use)
        metrics = [
            CardMetric(name=name, value=value, data=where, examples=examples, command=command)
            for name, value in found.items()
        ]
    return draft_card(
        job.card,
        name=source if network is not None else file.stem,
        task=network.task if network is not None else "not stated",
        recipe=file.read_text(encoding="utf-8"),
        metrics=metrics,
        description="" if network is not None else f"What {file.name} has trained.",
        references=[network.paper] if network is not None and network.paper else (),
        parameters=parameters,
    )


def _name(job: Job, use: str) -> str:
    """What the card, or else the file, calls the data with this use."""
    tables = job.card.get("data", [])
    named = [str(each.get("name")) for each in tables if isinstance(each, dict) and each.get("use") == use]
    place = getattr(job.data, use) or job.data.python or "the data"
    return named[0] if named else f"{Path(place).name}, {use}"


def _count(data: Any) -> int:
    from archipel.datasets import Dataset, as_dataset

    opened = as_dataset(data)
    return len(opened) if isinstance(opened, Dataset) else 0
