"""`archipel convert`: a model file becomes a signed bundle."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.bundle import Bundle
from archipel.cli.input_output.publisher_keys import read_signing_key, signing_key
from archipel.cli.models.option_groups import CompressionOptions, compression_options, option_group
from archipel.cli.models.progress import catch_ctrl_c, progress_callback, progress_line, resume_hint
from archipel.compression import Progress
from archipel.compression.recipe import check_sets, load_recipe
from archipel.converter import Compression, Signing, Training
from archipel.converter.options import DAY, VALID_DAYS
from archipel.converter.pipeline import make_bundle
from archipel.converter.request import Request
from archipel.errors import CommandError
from archipel.strategies.registry import STRATEGIES
from archipel.training import losses, optimizers
from archipel.training.optimizers import Optimizer

LOSSES = ("cross_entropy", "binary_cross_entropy", "mse", "l1", "huber", "kl_divergence")
OPTIMIZERS = ("sgd", "adam", "adamw", "adagrad", "rmsprop")


@dataclass(frozen=True)
class TrainingOptions:
    """How devices train the model. Without a loss they only predict."""

    loss: str | None
    optimizer: str
    lr: float | None
    momentum: float | None
    weight_decay: float | None
    trainable: tuple[str, ...]
    strategy: str
    epochs: int
    batch_size: int

    def training(self) -> Training | None:
        """The same for `convert`, None without a loss. Raises ArchipelError."""
        # Made without a loss, too: a wrong option of the optimizer is an error either way.
        optimizer = self._optimizer()
        if self.loss is None:
            return None
        return Training(
            getattr(losses, self.loss)(),
            optimizer,
            trainable=self.trainable,
            strategy=self.strategy,
            epochs=self.epochs,
            batch_size=self.batch_size,
        )

    def _optimizer(self) -> Optimizer:
        options = {"lr": self.lr, "momentum": self.momentum, "weight_decay": self.weight_decay}
        given = {option: value for option, value in options.items() if value is not None}
        if self.optimizer != "sgd" and "momentum" in given:
            raise CommandError(f"--momentum is an option of sgd; {self.optimizer} has its own")
        optimizer: Optimizer = getattr(optimizers, self.optimizer)(**given)
        return optimizer


@dataclass(frozen=True)
class ValidityOptions:
    """Which devices may use the bundle, until when, and which bundles it replaces."""

    populations: tuple[str, ...]
    valid_days: int
    sequence: int

    def signing(self, key: Ed25519PrivateKey) -> Signing:
        """The same for `convert`, with the publisher's key. Raises ConversionError."""
        # A whole number of days, so that bundles that are made on one day are the same.
        end = (int(time.time()) // DAY + self.valid_days) * DAY if self.valid_days else 0
        return Signing(key, sequence=self.sequence, not_after=end, populations=self.populations)


training_options = option_group(
    "training",
    TrainingOptions,
    click.option(
        "--loss", type=click.Choice(LOSSES), help="The loss that devices train with. Without it they only predict."
    ),
    click.option(
        "--optimizer",
        type=click.Choice(OPTIMIZERS),
        default="sgd",
        show_default=True,
        help="The optimizer that devices train with.",
    ),
    click.option("--lr", type=click.FloatRange(0, min_open=True), help="Learning rate. Default: the optimizer's."),
    click.option("--momentum", type=click.FloatRange(0, 1, max_open=True), help="Momentum of sgd."),
    click.option("--weight-decay", type=click.FloatRange(0), help="Weight decay of the optimizer."),
    click.option("--trainable", multiple=True, default=("*",), show_default=True, metavar="GLOB",
                 help="Parameters that devices train; may be given several times."),
    click.option("--strategy", type=click.Choice(sorted(STRATEGIES)), default="fedavg", show_default=True,
                 help="The federated algorithm."),
    click.option(
        "--epochs", type=click.IntRange(1), default=1, show_default=True, help="Epochs of a device in one round."
    ),
    click.option(
        "--batch-size",
        type=click.IntRange(1),
        default=16,
        show_default=True,
        help="Examples in one training step of a device.",
    ),
)  # fmt: skip
validity_options = option_group(
    "validity",
    ValidityOptions,
    click.option(
        "--population",
        "populations",
        multiple=True,
        help="A population that may use it; may be given several times. Default: any.",
    ),
    click.option("--valid-days", type=click.IntRange(0, 36500), default=VALID_DAYS, show_default=True,
                 help="How many days devices train with it and adopt it; predicting has no end. 0: no end."),
    click.option("--sequence", type=click.IntRange(0), default=0, show_default=True,
                 help="A greater number ends the use of all bundles of this name with a smaller one."),
)  # fmt: skip


@click.command("convert")
@click.argument("source", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True,
              help="The bundle: a file if it ends in .bundle, else a folder; must not exist.")  # fmt: skip
@signing_key
@training_options
@click.option("--name", help="The bundle's name. Default: the output's.")
@validity_options
@compression_options
def convert_command(
    source: Path,
    output: Path,
    key_file: Path | None,
    training: TrainingOptions,
    name: str | None,
    validity: ValidityOptions,
    compression: CompressionOptions,
) -> None:
    """Make a signed bundle from SOURCE, an ONNX file or a program that torch.export.save wrote (.pt2).

    \b
    archipel convert model.onnx -o model.bundle
    archipel keys publisher
    archipel convert model.onnx -o model.bundle --key publisher --loss cross_entropy --lr 0.05 --trainable "head.*"
    archipel convert model.onnx -o model.bundle --key publisher --recipe recipe.toml --data train.npz

    A recipe compresses the model first, as `archipel compress` does. With a loss, devices train the float parameters of
    the compressed model, and the bundle rounds them anew after training.
    """
    key = read_signing_key(key_file)
    if output.exists():
        raise CommandError(f"{output}: exists already; remove it or choose another name")
    if compression.recipe is None and any((*compression.files.values(), compression.work)):
        raise CommandError("--data, --calibration, --validation and --work are for compression; give --recipe")
    trained, signing = training.training(), validity.signing(key)
    with catch_ctrl_c(resume_hint(compression.work)) as check, progress_line() as show:
        # `convert` takes a batch size with a training only. Here the limits follow --batch-size without one, too.
        bundle = make_bundle(
            Request(
                source,
                output,
                signing,
                training=trained,
                compression=_compression(compression, progress_callback(check, show)),
                name=name,
                batch_size=training.batch_size,
            )
        )
    click.echo(_summary(bundle, output))


def _compression(options: CompressionOptions, on_progress: Callable[[Progress], None]) -> Compression | None:
    if options.recipe is None:
        return None
    parts = load_recipe(options.recipe)
    # Which files are missing is known before any of them is read.
    check_sets(parts, options.files)
    return Compression(parts, **options.read_sets(), seed=options.seed, folder=options.work, on_progress=on_progress)


def _summary(bundle: Bundle, output: Path) -> str:
    manifest = bundle.manifest
    size = sum(path.stat().st_size for path in ([output] if output.is_file() else output.rglob("*")) if path.is_file())
    lines = [f"{output}: {manifest.name!r}, {size:,} bytes, digest {bundle.digest}"]
    metrics = manifest.lineage.metrics
    if "nbytes_before" in metrics:
        lines.append(f"predict: {metrics['nbytes_before']:,.0f} -> {metrics['nbytes_after']:,.0f} bytes")
    if "accuracy_before" in metrics:
        lines.append(f"accuracy: {100 * metrics['accuracy_before']:.2f} -> {100 * metrics['accuracy_after']:.2f} %")
    lines.append(f"programs {', '.join(sorted(manifest.programs))}; {len(manifest.parameters)} parameters")
    if "train" not in {program.kind for program in manifest.programs.values()}:
        lines.append("it predicts only; with --loss devices can train it")
    return "\n".join(lines)
