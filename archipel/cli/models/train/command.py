"""`archipel train`: train a network as a TOML file says, with PyTorch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from archipel.cli.input_output.sources import open_source
from archipel.cli.input_output.stopping import catch_ctrl_c
from archipel.cli.models.train.card import make_card
from archipel.cli.models.train.data import Data, read_data
from archipel.cli.models.train.job import EXAMPLE, Job, read_job
from archipel.errors import CommandError, DatasetError, GraphError, TrainingError
from archipel.models.source import make_network

if TYPE_CHECKING:
    from archipel.training.cloud import Epoch, TrainConfig, Trainer, TrainResult


class _Command(click.Command):
    """Shows the example file as it is."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_paragraph()
        formatter.write("A file with everything that is common (paths are relative to where you are):\n\n")
        formatter.write("".join(f"  {line}\n" if line else "\n" for line in EXAMPLE.split("\n")))


@click.command("train", cls=_Command)
@click.argument("config", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--resume", is_flag=True, help="Go on from the checkpoint of a run that was interrupted.")
@click.option("--dry-run", is_flag=True, help="Check everything, compute one batch, and write nothing.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="In place of the file's: --set epochs=3")
def train_command(config: Path, resume: bool, dry_run: bool, settings: tuple[str, ...]) -> None:
    """Train the network of CONFIG, a TOML file, and write it as ONNX.

    Ctrl-C stops after the present batch, writes a checkpoint and ends; --resume goes on there, to the same numbers.

    \b
    archipel train digits.toml
    archipel train digits.toml --set epochs=3 --set optimizer.lr=0.01 --dry-run
    archipel train digits.toml --resume
    """
    from archipel.training.cloud.config import parse_config

    job = read_job(config, settings)
    with _named(config), tempfile.TemporaryDirectory(prefix="archipel-train-") as work:
        folder = Path(job.output.folder)
        _check_folder(folder)
        settings_of = parse_config({"checkpoint": str(folder / "checkpoint"), **job.train})
        settings_of = msgspec.structs.replace(settings_of, resume=resume)
        make_card(job, config, settings)  # before hours of training, for what is wrong in it
        # Before the model, whose parameters may come from the user's own function.
        from archipel.training.cloud.checkpoints.generators import seed_generators

        seed_generators(settings_of.seed)
        model, data = _model(job, settings_of.seed, work), read_data(job)
        if job.preprocess:
            model = _prepared(model, job, data)
        if dry_run:
            _try(model, data, settings_of)
            return
        result = _run(model, data, settings_of, config)
        if not _speaks():
            return
        best = result.best.metrics if result.history else {}
        count = sum(each.numel() for each in result.module.parameters() if each.requires_grad)
        card = make_card(job, config, settings, data=data, validated=best, tested=result.test, parameters=count)
        for path in result.save(folder, card):
            click.echo(f"written to {path}")


def _run(model: Any, data: Data, config: TrainConfig, file: Path) -> TrainResult:
    from archipel.training.cloud import train as train_network

    hint = f"the checkpoint is in {config.checkpoint}; go on with: archipel train {file} --resume" if _speaks() else ""
    with catch_ctrl_c(hint) as check:
        result = train_network(
            model, data.train, config, validation=data.validation, test=data.test,
            callbacks=[_stop_at_ctrl_c(check)], on_epoch=_show,
        )  # fmt: skip
        if not result.finished:
            raise KeyboardInterrupt
    if result.history and _speaks():
        best = result.best
        click.echo(f"best epoch {best.number}: {_numbers(best.metrics)}")
    if result.test and _speaks():
        click.echo(f"test: {_numbers(result.test)}")
    return result


def _try(model: Any, data: Data, config: TrainConfig) -> None:
    """Everything up to the first step."""
    from archipel.training.cloud import prepare

    quiet = msgspec.structs.replace(
        config, checkpoint=None, checkpoint_every=None, tensorboard=None, mlflow=None, wandb=None, progress=False
    )
    trainer = prepare(model, data.train, quiet, validation=data.validation)
    click.echo(f"model: {trainer.parameter_count:,} trained parameters, on {trainer.device}")
    fields = trainer.batches.dataset.fields
    click.echo(f"data: {', '.join(f'{name}: {field}' for name, field in fields.items())}")
    try:
        click.echo(f"{len(trainer.batches)} minibatches of {config.batch_size} in an epoch")
    except TypeError:
        click.echo(f"minibatches of {config.batch_size}; nobody knows how many there are")
    batch = next(iter(trainer.batches))
    click.echo(f"first loss: {float(trainer.step(batch)):.4f}")
    click.echo("nothing is written: leave out --dry-run to train")


def _model(job: Job, seed: int, work: str) -> Any:
    kind, name = job.model.source
    if kind in ("zoo", "python"):
        return make_network(job.model, seed)
    if job.model.arguments:
        raise CommandError(f"model.arguments: are for zoo and python; {kind} has none")
    return open_source(Path(name), [Path(key) for key in job.model.key], None, work).model


def _check_folder(folder: Path) -> None:
    """Raise CommandError where the results cannot be written: better before hours of training than after them."""
    there = folder.absolute()
    try:
        while not there.exists():
            there = there.parent
        with tempfile.TemporaryDirectory(prefix=".archipel-", dir=there):
            pass
    except OSError as error:
        raise CommandError(f"output.folder: {folder}: {error.strerror}; choose a folder that can be written") from None


def _prepared(model: Any, job: Job, data: Data) -> Any:
    from archipel.preprocessing import from_settings  # first: its error names the extra that is missing
    from archipel.training.cloud.preprocess import with_preprocessing

    try:
        return with_preprocessing(model, from_settings(job.preprocess), data.train)
    except (GraphError, DatasetError) as error:
        text = str(error)
        raise CommandError(text if text.startswith("[[preprocess]]") else f"[[preprocess]]: {text}") from None


def _stop_at_ctrl_c(check: Callable[[], None]) -> Any:
    from archipel.training.cloud import Callback

    class Stop(Callback):
        def after_batch(self, trainer: Trainer, loss: Any) -> None:
            try:
                check()
            except KeyboardInterrupt:
                trainer.stop = True  # the loop then ends after a checkpoint of this batch

    return Stop()


def _show(epoch: Epoch) -> None:
    if _speaks():
        numbers = _numbers(epoch.metrics)
        click.echo(f"epoch {epoch.number}: training loss {epoch.train_loss:.4f}, {numbers}, {epoch.seconds:.1f} s")


def _speaks() -> bool:
    """Whether this process prints and writes: of those that torchrun starts, the first one."""
    return os.environ.get("RANK", "0") == "0"


def _numbers(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items()) or "no validation data"


@contextmanager
def _named(file: Path) -> Iterator[None]:
    """A context: errors name the file, and a setting of the training by its key in it."""
    try:
        yield
    except (TrainingError, CommandError) as error:
        from archipel.training.cloud import TrainConfig

        text = str(error)
        key = text.partition(":")[0].partition(".")[0]
        place = "train." if key in TrainConfig.__struct_fields__ else ""
        raise CommandError(f"{file}: {place}{text}") from None
