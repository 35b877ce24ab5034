"""The tables of a federation's file, as it is written."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from archipel.models.source import ModelSource
from archipel.protocol.messages import Protocol
from archipel.protocol.operator.differential_privacy import DifferentialPrivacy
from archipel.simulation.attacks import Attack
from archipel.simulation.choosing import ClientAxis
from archipel.simulation.evaluation import Evaluation
from archipel.simulation.federation_parts.data import DataSource
from archipel.simulation.federation_parts.models import ModelOfSome
from archipel.simulation.federation_parts.root import RootSource
from archipel.simulation.running import Cluster
from archipel.simulation.system.settings import System
from archipel.strategies.robust import Aggregation

Count = Annotated[int, Meta(ge=1)]

ONCE = ("rounds", "cohort", "privacy", "hyperparameters", "aggregation", "secure_groups", "protocol",
         "differential_privacy")  # fmt: skip
"""What a task has, too, and the file outside of [task]."""
ROOT = "root"
"""In [task]: the device that a server takes for the examples of `[root]`; a task has it in its aggregation."""


class TrainingPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[training]: how a device trains in a round, as the arguments of `converter.Training`."""

    loss: str | dict[str, Any] = "cross_entropy"
    optimizer: str | dict[str, Any] = msgspec.field(default_factory=lambda: {"name": "sgd", "lr": 0.1})
    epochs: Count = 1
    batch_size: Count = 16
    trainable: str | list[str] = "*"
    loss_output: str | None = None
    step_options: dict[str, Any] = {}


class RunPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[run]: how the simulation runs, see `RunOptions`."""

    workers: Annotated[int, Meta(ge=0)] = 1
    client_axis: ClientAxis = "auto"
    threads: Count = 1
    engine: str = "onnxruntime"
    cluster: Cluster = "local"
    masks: bool = False
    folder: str | None = None
    keep_rounds: bool = False
    test_every: Count = 1


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole file."""

    rounds: Count
    data: DataSource
    model: ModelSource | None = None
    models: tuple[ModelOfSome, ...] = ()
    root: RootSource | None = None
    cohort: Count | None = None
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    privacy: Literal["secure", "plain"] = "secure"
    seed: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0
    training: TrainingPart | None = None
    strategy: str | dict[str, Any] | None = None
    hyperparameters: dict[str, float] = {}
    aggregation: Aggregation = Aggregation()
    secure_groups: Annotated[int, Meta(ge=0)] = 0
    protocol: Protocol | None = None
    attack: Attack = Attack()
    differential_privacy: DifferentialPrivacy = DifferentialPrivacy()
    partition: dict[str, Any] | None = None
    evaluation: Evaluation | None = None
    run: RunPart = RunPart()
    system: System | None = None
    task: dict[str, Any] = {}
    tune: dict[str, Any] = {}

    @property
    def sources(self) -> tuple[ModelSource, ...]:
        """Where the models come from: that of [model], or those of [[models]]."""
        return self.models if self.model is None else (self.model,)
