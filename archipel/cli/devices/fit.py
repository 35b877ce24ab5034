"""`archipel fit`: train a bundle further on data in files; an interrupted run continues from its checkpoint."""

from __future__ import annotations

import json
import math
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import click
import numpy as np

from archipel.bundle.roles import Example, ExampleWeight, Label, Port
from archipel.cli.devices.fit_table import evaluation_means, fit_table
from archipel.cli.devices.run import DELEGATES, deployed
from archipel.cli.input_output.arrays import check_fields, read_fields
from archipel.cli.input_output.publisher_keys import publisher_keys
from archipel.cli.input_output.sources import open_runtime
from archipel.errors import CommandError, IndexRangeError
from archipel.lite_runtime import Control, History, Progress
from archipel.lite_runtime.evaluation import evaluation_fields
from archipel.lite_runtime.learned import check_slot
from archipel.lite_runtime.out_of_range import locate
from archipel.lite_runtime.training.driver import need_program


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@publisher_keys
@click.option("--data", type=click.Path(path_type=Path), required=True,
              help=".npz with an entry for each field of the bundle, first axis = examples.")  # fmt: skip
@click.option(
    "--validation", type=click.Path(path_type=Path), help="An .npz on which the model is evaluated after every epoch."
)
@click.option(
    "--epochs", type=click.IntRange(1), default=1, show_default=True, help="How many times to go through the data."
)
@click.option("--batch-size", type=click.IntRange(1), default=32, show_default=True, help="Examples in one step.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="A hyperparameter, such as lr=0.01.")
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the data order and of randomness."
)
@click.option(
    "--save", type=click.Path(path_type=Path), help="A new folder for the trained model; `archipel run` opens it."
)
@click.option("--force", is_flag=True, help="Replace what an earlier fit of this bundle saved there.")
@click.option("--checkpoint", type=click.Path(path_type=Path),
              help="A file for progress; after an interruption the same command continues from it.")  # fmt: skip
@click.option(
    "--checkpoint-every",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    help="Seconds between two checkpoints.",
)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Threads for one operator.")
@DELEGATES
@click.option("--json", "as_json", is_flag=True, help="Print the whole history as one JSON object.")
def fit(
    bundle: Path,
    key_files: tuple[Path, ...],
    data: Path,
    validation: Path | None,
    epochs: int,
    batch_size: int,
    settings: tuple[str, ...],
    seed: int,
    save: Path | None,
    force: bool,
    checkpoint: Path | None,
    checkpoint_every: float,
    threads: int,
    delegates: tuple[str, ...],
    as_json: bool,
) -> None:
    """Train BUNDLE (a file, a folder, or a saved model) further on data in a file. Nothing leaves this machine.

    \b
    archipel fit digits.bundle --key publisher.pub --data mine.npz --epochs 3 --set lr=0.01 --save mine
    archipel run mine --key publisher.pub --input x.npy

    With --checkpoint Ctrl-C stops after the present step, and the same command continues as if nothing had happened.
    """
    if save is not None and save.exists() and not force:
        raise CommandError(f"{save}: exists already; choose another name, or replace it with --force")
    with tempfile.TemporaryDirectory() as folder:
        runtime = open_runtime(bundle, key_files, folder, threads, delegates)
        if save is not None:
            check_slot(save, runtime.bundle)  # now, and not when hours of training are over
        x = _fields(data, runtime.bundle.program(need_program(runtime.bundle, "train", "train")).inputs)
        held_out = None if validation is None else (_fields(validation, evaluation_fields(runtime.bundle)), None)
        control = _StopAtCheckpoint()
        started = time.perf_counter()
        with _catch_ctrl_c(control), _progress_line(len(next(iter(x.values()))), epochs, batch_size) as on_step:
            try:
                history = runtime.fit(
                    x,
                    epochs=epochs,
                    batch_size=batch_size,
                    seed=seed,
                    hyperparameters=_hyperparameters(settings),
                    validation=held_out,
                    callbacks=[on_step],
                    checkpoint=checkpoint,
                    checkpoint_every=checkpoint_every,
                    control=control,
                )
            except IndexRangeError as error:
                files = {data: x} if validation is None or held_out is None else {data: x, validation: held_out[0]}
                found = ((file, locate(error, runtime.bundle, arrays)) for file, arrays in files.items())
                text = next((f"{file}: {each}" for file, each in found if each is not error), str(error))
                raise CommandError(text) from None
            except KeyboardInterrupt:
                click.echo(f"\n{_resume_hint(checkpoint, control)}", err=True)
                raise click.Abort from None
        seconds = time.perf_counter() - started
        if save is not None:
            runtime.save(save)
        # Here, because the bundle's files may be in the folder that is about to go.
        answers, after_epochs = "", []
        if held_out is not None:
            answers = deployed(runtime.bundle)
            evaluate = runtime.bundle.program(need_program(runtime.bundle, "evaluate", "evaluate"))
            count = len(next(iter(held_out[0].values())))
            after_epochs = [evaluation_means(evaluate, metrics, count) for metrics in history.validation]
    if as_json:
        click.echo(_json(history, after_epochs, seconds, save))
        return
    click.echo(fit_table(history, epochs, after_epochs))
    click.echo("training: of the training form (the float programs), before each step")
    if after_epochs:
        click.echo(f"validation: means of {answers}, after each epoch")
    click.echo(f"{history.steps} steps on {history.examples} examples in {seconds:.1f} s")
    if save is not None:
        click.echo(f"saved to {save}")
    else:
        click.echo("not saved: give --save FOLDER to keep what was learned")


class _StopAtCheckpoint(Control):
    """Ends a fit between two steps after Ctrl-C, once the checkpoint is written."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = False
        self.reached = False

    def between_steps(self, on_pause: Callable[[], None]) -> bool:
        if self.asked:
            on_pause()  # writes the checkpoint, if the fit has one
            self.reached = True
            raise KeyboardInterrupt
        return super().between_steps(on_pause)


@contextmanager
def _catch_ctrl_c(control: _StopAtCheckpoint) -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: FrameType | None) -> None:
        control.asked = True
        # A second Ctrl-C does not wait for the step to end: it raises KeyboardInterrupt wherever the program is.
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _resume_hint(checkpoint: Path | None, control: _StopAtCheckpoint) -> str:
    if checkpoint is None:
        return "nothing was kept; with --checkpoint FILE an interrupted fit can go on"
    if control.reached or checkpoint.exists():
        return f"the checkpoint is in {checkpoint}; run the same command again to go on from it"
    return f"stopped before the first checkpoint; nothing is in {checkpoint}"


@contextmanager
def _progress_line(examples: int, epochs: int, batch_size: int) -> Iterator[Callable[[Progress], None]]:
    """Yield a callback that writes one line on stderr anew, ten times a second at most; in a terminal only."""
    steps = epochs * math.ceil(examples / batch_size)
    started: tuple[float, int] | None = None
    shown = 0.0

    def on_step(progress: Progress) -> None:
        nonlocal started, shown
        now = time.monotonic()
        # A fit that continues from a checkpoint starts in the middle: the speed counts from its first step here.
        started = started or (now, progress.step)
        if not sys.stderr.isatty() or now - shown < 0.1:
            return
        shown = now
        speed = (progress.step - started[1]) / max(now - started[0], 1e-9)
        left = f", {(steps - progress.step) / speed:.0f} s left" if speed else ""
        loss = "" if progress.loss is None else f", loss {progress.loss:.4f}"
        line = f"epoch {progress.epoch + 1}/{epochs}, step {progress.step + 1}/{steps}{loss}{left}"
        click.echo(f"\r{line:<76}", nl=False, err=True)

    yield on_step
    if shown:
        click.echo(f"\r{'':<76}\r", nl=False, err=True)


def _fields(path: Path, ports: Sequence[Port]) -> dict[str, np.ndarray]:
    arrays = read_fields(path, ports)
    check_fields(path, ports, arrays, Example, Label, ExampleWeight)
    return arrays


def _hyperparameters(settings: Sequence[str]) -> dict[str, float]:
    values: dict[str, float] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        try:
            values[name] = float(text)
        except ValueError:
            equals = ""  # the check below then refuses the setting
        if not equals or not name or not math.isfinite(values[name]):
            raise CommandError(f"--set {setting}: expected NAME=NUMBER, such as lr=0.01")
    return values


def _json(history: History, validation: Sequence[Mapping[str, float]], seconds: float, save: Path | None) -> str:
    return json.dumps(
        {
            "losses": history.losses,
            "metrics": {name: list(map(_finite, values)) for name, values in history.metrics.items()},
            "validation": [{name: _finite(value) for name, value in epoch.items()} for epoch in validation],
            "steps": history.steps,
            "examples": history.examples,
            "stopped": history.stopped,
            "seconds": seconds,
            "saved": None if save is None else str(save),
        },
        allow_nan=False,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
