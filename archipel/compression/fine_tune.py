"""FineTune: train the graph that earlier parts of a recipe have made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from archipel.compression.arguments import check_choices, check_whole
from archipel.compression.part import Need
from archipel.errors import CompressionError
from archipel.training.optimizers import Optimizer, adam, adamw, sgd
from archipel.training.schedules import Schedule, constant, cosine, one_cycle

if TYPE_CHECKING:
    from archipel.compression.compressed import CompressedModel
    from archipel.compression.work import Work

Augment = Literal["none", "shift", "shift_flip"]
BatchNorm = Literal["train", "frozen"]


@dataclass(frozen=True)
class FineTune:
    """Train every parameter on the training data for `epochs`, or for exactly `steps`.

    After quantization this is quantization-aware training: the graph rounds, and gradients go straight through.

    Arguments:
        optimizer: "adam", or "sgd" with `momentum` (Nesterov); both with `weight_decay`.
        lr: the largest learning rate. `schedule` lowers it to 0 ("cosine", "one_cycle") or keeps it ("constant").
        augment: "shift" moves images [batch, channels, height, width] by up to `shift` pixels, "shift_flip" also
            mirrors half of them.
        batch_norm: "frozen" leaves running statistics as they are.

    Raises CompressionError for a field out of range.

    Example:
        better, report = archipel.compress(model, [FineTune(epochs=1, lr=1e-3)], data=data)
    """

    epochs: int = 1
    steps: int | None = None
    batch_size: int = 32
    optimizer: Literal["adam", "sgd"] = "adam"
    lr: float = 1e-3
    momentum: float = 0.9
    weight_decay: float = 0.0
    schedule: Literal["cosine", "one_cycle", "constant"] = "cosine"
    augment: Augment = "none"
    shift: int = 2
    batch_norm: BatchNorm = "train"

    def __post_init__(self) -> None:
        check_whole(self, "epochs", "batch_size", *(() if self.steps is None else ("steps",)))
        if not self.lr > 0:
            raise CompressionError(f"FineTune: lr must be above 0, is {self.lr!r}")
        check_choices(
            self,
            optimizer=("adam", "sgd"),
            schedule=("cosine", "one_cycle", "constant"),
            augment=get_args(Augment),
            batch_norm=get_args(BatchNorm),
        )

    @property
    def needs(self) -> tuple[Need, ...]:
        return ("data",)

    def apply(self, model: CompressedModel, work: Work) -> CompressedModel:
        return work.train(model, self)

    def make_optimizer(self, steps: int) -> Optimizer:
        """The optimizer with its learning rate as a function of the step, for a run of `steps`."""
        lr: Schedule = constant(self.lr)
        if self.schedule == "cosine":
            lr = cosine(self.lr, steps)
        elif self.schedule == "one_cycle" and steps > 3:
            lr = one_cycle(self.lr, steps)
        if self.optimizer == "adam":
            return adamw(lr, weight_decay=self.weight_decay) if self.weight_decay else adam(lr)
        return sgd(self.momentum, nesterov=self.momentum > 0, weight_decay=self.weight_decay, lr=lr)


def steps_per_epoch(examples: int, batch_size: int) -> int:
    """The number of whole batches, at least 1. A smaller last one is left out: its statistics would be noise."""
    return max(examples // batch_size, 1)
