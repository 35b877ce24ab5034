"""The options of `archipel convert` that say how devices train: loss, optimizer, strategy, and what a step does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast, get_args

import click

from archipel.cli.input_output.option_group import option_group
from archipel.cli.input_output.settings import read_call, read_settings, settings_of
from archipel.cli.input_output.strategy_options import read_strategy_options, strategy_option
from archipel.converter import Training
from archipel.converter.options import BATCH_SIZE, LOSS_RANGE
from archipel.errors import CommandError
from archipel.strategies.registry import STRATEGIES
from archipel.training import by_name, per_example, schedules, transforms
from archipel.training.batch_norm import BatchNorm
from archipel.training.by_name import LOSSES, OPTIMIZERS
from archipel.training.losses import Loss
from archipel.training.optimizers import Optimizer
from archipel.training.recompute import Recompute, recompute
from archipel.training.step import StepOptions

# With a warm-up, which goes in front of another schedule.
SCHEDULES = {**by_name.SCHEDULES, "warmup": schedules.warmup}
TRANSFORMS = {
    make.__name__: make
    for make in (transforms.clip_by_norm, transforms.clip_by_value, transforms.weight_decay, transforms.proximal)
}
SHORT = {"lr": "--lr", "momentum": "--momentum", "weight_decay": "--weight-decay"}
"""Arguments of optimizers that have an option of their own."""


@dataclass(frozen=True)
class TrainingOptions:
    """How devices train the model. Without a loss they only predict."""

    loss: str | None
    loss_option: tuple[str, ...]
    optimizer: str
    optimizer_option: tuple[str, ...]
    lr: float | None
    schedule: tuple[str, ...]
    momentum: float | None
    weight_decay: float | None
    trainable: tuple[str, ...]
    strategy: str
    strategy_option: tuple[str, ...]
    epochs: int
    batch_size: int
    loss_range: float
    loss_output: str | None
    batch_norm: BatchNorm
    dropout: bool
    accumulate: int
    precision: str
    recompute: str | None
    kernels: bool
    transform: tuple[str, ...]
    per_example: tuple[str, ...]
    target_epsilon: float | None
    target_rounds: int | None

    def training(self) -> Training | None:
        """The same for `convert`, None without a loss. Raises ArchipelError."""
        # Made without a loss, too: a wrong option of the optimizer is an error either way.
        optimizer, step, strategy = self._optimizer(), self._step(), self._strategy_options()
        if self.loss is None:
            if self.loss_option:
                raise CommandError("--loss-option is an option of a loss; give --loss")
            return None
        return Training(
            self._loss(self.loss),
            optimizer,
            trainable=self.trainable,
            step_options=step,
            strategy=self.strategy,
            strategy_options=strategy,
            epochs=self.epochs,
            batch_size=self.batch_size,
            loss_range=self.loss_range or None,
            loss_output=self.loss_output,
        )

    def _loss(self, name: str) -> Loss:
        make = LOSSES[name]
        made: Loss = make(**read_settings("--loss-option", self.loss_option, settings_of(make), name))
        return made

    def _optimizer(self) -> Optimizer:
        make = OPTIMIZERS[self.optimizer]
        known = settings_of(make)
        given = {name: value for name, value in (("lr", self._rate()), ("momentum", self.momentum),
                                                 ("weight_decay", self.weight_decay)) if value is not None}  # fmt: skip
        for name in given:
            if name not in known:
                raise CommandError(f"{SHORT[name]}: {self.optimizer} has none; it has {', '.join(known)}")
        further = {name: setting for name, setting in known.items() if name not in SHORT}
        options = read_settings("--optimizer-option", self.optimizer_option, further, self.optimizer, SHORT)
        made: Optimizer = make(**given, **options)
        return made

    def _rate(self) -> Any:
        """The learning rate as a number or a schedule, None for the optimizer's default."""
        rate: Any = self.lr
        if self.schedule and rate is None:
            raise CommandError("--schedule changes the learning rate; give that as --lr")
        for text in self.schedule:
            if rate is not self.lr and text.partition(":")[0] != "warmup":
                raise CommandError(f"--schedule {text}: only warmup can follow another schedule")
            rate = read_call("--schedule", text, SCHEDULES, rate)
        return rate

    def _step(self) -> StepOptions:
        # Only what differs from the default: the strategies look at what was given.
        options: dict[str, Any] = {
            "transforms": [read_call("--transform", text, TRANSFORMS) for text in self.transform],
            "accumulate": self.accumulate,
            "batch_norm": self.batch_norm,
            "dropout": self.dropout,
            "per_example": self._per_example(),
            "precision": self.precision,
            "recompute": self._recompute(),
            "kernels": self.kernels,
        }
        defaults = {"transforms": [], "accumulate": 1, "batch_norm": "train", "dropout": True, "per_example": None,
                    "precision": "float32", "recompute": None, "kernels": False}  # fmt: skip
        return cast(StepOptions, {name: value for name, value in options.items() if value != defaults[name]})

    def _per_example(self) -> Any:
        if not self.per_example:
            return None
        return per_example(
            **read_settings("--per-example", self.per_example, settings_of(per_example), "--per-example")
        )

    def _recompute(self) -> Recompute | None:
        if self.recompute is None:
            return None
        if self.recompute != "auto" and not self.recompute.isdecimal():
            raise CommandError(f"--recompute {self.recompute}: give auto, or a whole number of bytes")
        return recompute(None if self.recompute == "auto" else int(self.recompute), self.batch_size)

    def _strategy_options(self) -> dict[str, Any]:
        given = read_strategy_options(self.strategy, self.strategy_option)
        if self.target_epsilon is None and self.target_rounds is None:
            return given
        if self.target_epsilon is None or self.target_rounds is None:
            raise CommandError("--target-epsilon and --target-rounds: give both, for how much all rounds may cost")
        if self.strategy != "dpsgd" or "noise_multiplier" in given:
            raise CommandError(
                "--target-epsilon chooses the noise_multiplier of --strategy dpsgd; give that strategy, and no "
                "--strategy-option noise_multiplier"
            )
        from archipel.client.memory.privacy import noise_for  # here: it takes as long as all else together

        return {**given, "noise_multiplier": noise_for(self.target_epsilon, self.epochs * self.target_rounds)}


training_options = option_group(
    "training",
    TrainingOptions,
    click.option(
        "--loss",
        type=click.Choice(list(LOSSES)),
        help="The loss that devices train with. Without it they only predict.",
    ),
    click.option("--loss-option", multiple=True, metavar="NAME=VALUE",
                 help="An option of the loss, such as label_smoothing=0.1; may be given several times."),
    click.option(
        "--optimizer",
        type=click.Choice(list(OPTIMIZERS)),
        default="sgd",
        show_default=True,
        help="The optimizer that devices train with.",
    ),
    click.option("--optimizer-option", multiple=True, metavar="NAME=VALUE",
                 help="A further option of the optimizer, such as nesterov=true; may be given several times."),
    click.option("--lr", type=click.FloatRange(0, min_open=True), help="Learning rate. Default: the optimizer's."),
    click.option("--schedule", multiple=True, metavar="NAME:ARGUMENT=VALUE,...",
                 help="How --lr changes over the steps of a round, such as cosine:steps=500; after it, "
                 "warmup:steps=20 puts a warm-up in front."),
    click.option("--momentum", type=click.FloatRange(0, 1, max_open=True), help="Momentum of sgd and rmsprop."),
    click.option("--weight-decay", type=click.FloatRange(0), help="Weight decay of the optimizer."),
    click.option("--trainable", multiple=True, default=("*",), show_default=True, metavar="GLOB",
                 help="Parameters that devices train; may be given several times."),
    click.option("--strategy", type=click.Choice(sorted(STRATEGIES)), default="fedavg", show_default=True,
                 help="The federated algorithm."),
    strategy_option,
    click.option(
        "--epochs", type=click.IntRange(1), default=1, show_default=True, help="Epochs of a device in one round."
    ),
    click.option(
        "--batch-size",
        type=click.IntRange(1),
        default=BATCH_SIZE,
        show_default=True,
        help="Examples in one training step of a device.",
    ),
    click.option("--loss-range", type=click.FloatRange(0), default=LOSS_RANGE, show_default=True,
                 help="Rounds report the mean training loss up to this number; 0: they report no metrics."),
    click.option("--loss-output", metavar="NAME",
                 help="The output of the model that the loss and the metrics read; it becomes the first output of "
                 "`predict`. Default: the first."),
    click.option("--batch-norm", type=click.Choice(get_args(BatchNorm)), default="train", show_default=True,
                 help="BatchNormalization in training. train: a step normalizes with its batch, and the running mean "
                 "and variance are averaged over the devices. frozen: with the model's own, which stay; choose it for "
                 "a pretrained model, and for batches of a few examples. folded: frozen, and computed into the layer "
                 "before, which makes the model smaller."),
    click.option("--dropout/--no-dropout", default=True, show_default=True,
                 help="Whether the model's Dropout drops in training."),
    click.option("--accumulate", type=click.IntRange(1), default=1, show_default=True,
                 help="Batches whose mean gradient makes one step of the optimizer."),
    click.option("--precision", type=click.Choice(["float32", "mixed"]), default="float32", show_default=True,
                 help="mixed: products in float16, with loss scaling."),
    click.option("--recompute", metavar="auto|BYTES",
                 help="Need less memory for a training step by computing parts of the forward pass twice. BYTES: what "
                 "intermediate values of a batch may take at once; auto: as little as possible."),
    click.option("--kernels/--no-kernels", default=False, show_default=True,
                 help="Write the convolutions and BatchNormalization of a training step as functions. Devices that "
                 "have installed the kernel pack (`archipel-kernels`) run its faster operators in their place; all "
                 "others run the functions' own bodies of standard operators."),
    click.option("--transform", multiple=True, metavar="NAME:ARGUMENT=VALUE,...",
                 help="Change gradients before the optimizer, such as clip_by_norm:max_norm=1; several in this order."),
    click.option("--per-example", multiple=True, metavar="NAME=VALUE",
                 help="Differential privacy for any strategy: clip=1 bounds each example's gradient, noise=1.1 adds "
                 "noise of this multiple to their sum. --strategy dpsgd has the same as its options."),
    click.option("--target-epsilon", type=click.FloatRange(0, min_open=True),
                 help="Choose the noise of --strategy dpsgd so that --target-rounds rounds cost each example at most "
                 "this epsilon, at delta 1e-6."),
    click.option("--target-rounds", type=click.IntRange(1),
                 help="The rounds that --target-epsilon is for; a device that takes part in fewer spends less."),
)  # fmt: skip
