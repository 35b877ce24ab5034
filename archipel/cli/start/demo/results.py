"""The measurements of one run of the demo. The tables in the terminal and the report show these only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Interval:
    """A difference of two accuracies on the same digits, in points (percent), with its 95% interval."""

    difference: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, eq=False)
class ModelScore:
    """A model on the held-out pupils. `per_writer` holds one accuracy (0..1) for each, in the same order throughout."""

    name: str
    accuracy: float
    per_writer: np.ndarray
    against: str | None = None
    interval: Interval | None = None


@dataclass(frozen=True)
class EpochRow:
    number: int
    train_loss: float
    validation_loss: float
    validation_accuracy: float
    best: bool


@dataclass(frozen=True)
class RoundRow:
    """One committed or failed round.

    `seconds` from opening to commit; `accuracy` (0..1) of the version that it made, None where nobody measured it.
    """

    number: int
    phase: str
    seconds: float
    accuracy: float | None
    survivors: tuple[str, ...]
    dropped: tuple[str, ...]
    reason: str = ""


def count_committed(rows: Sequence[RoundRow]) -> int:
    return sum(row.phase == "committed" for row in rows)


@dataclass(frozen=True)
class FormRow:
    """One form of the published model: its file, its speed at batch 1 on one thread, its accuracy (0..1)."""

    name: str
    bytes: int
    microseconds: float
    accuracy: float


@dataclass(frozen=True)
class DeviceRow:
    """One device. Bytes are HTTP bodies over all rounds; `furthest` is the last phase it answered in, by round."""

    name: str
    examples: int
    sent: int
    received: int
    furthest: tuple[str, ...]


@dataclass(frozen=True)
class EdgeRow:
    """One edge server: its devices, the rounds that it carried out for the root and that were counted, the median of
    their seconds, and the bytes of bodies between it and the root in all rounds."""

    name: str
    devices: int
    rounds: int
    seconds: float
    bytes: int


@dataclass(frozen=True)
class TreeResults:
    """Edge servers against the same devices at one server, in as many first rounds of both.

    Bytes are of bodies at the root, or at the one server, a round; seconds are those of a round, the median. `checked`:
    the number of the round that was computed again, of the updates of so many devices, and whether the model was
    `equal` bit for bit.
    """

    edges: list[EdgeRow]
    compared: int
    root_bytes: float
    flat_bytes: float
    seconds: float
    flat_seconds: float
    checked: int
    checked_devices: int
    equal: bool


@dataclass
class Results:
    """Filled stage by stage."""

    seed: int
    devices: int
    processes: int
    parameters: int
    held_out_writers: int
    held_out_digits: int
    staff_digits: int
    device_digits: int
    epochs: list[EpochRow] = field(default_factory=list)
    rounds: list[RoundRow] = field(default_factory=list)
    scores: list[ModelScore] = field(default_factory=list)
    halves: list[ModelScore] = field(default_factory=list)
    forms: list[FormRow] = field(default_factory=list)
    agreement: float = 0.0
    fleet: list[DeviceRow] = field(default_factory=list)
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """Of the task: the points (round, value) of each metric of the rounds by its name."""
    tree: TreeResults | None = None
    """Of a run over edge servers."""
    stages: list[tuple[str, float]] = field(default_factory=list)
    peak_memory: int = 0

    @property
    def total_seconds(self) -> float:
        return sum(seconds for _, seconds in self.stages)

    def score(self, name: str) -> ModelScore:
        return next(score for score in self.scores if score.name == name)
