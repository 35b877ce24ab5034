"""`archipel tune`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import click
import msgspec

from archipel.cli.input_output.progress_line import progress_line
from archipel.cli.input_output.stopping import catch_ctrl_c
from archipel.cli.input_output.tables import as_json, show
from archipel.cli.input_output.targets import check_target
from archipel.operator.curves import check_plot_name

if TYPE_CHECKING:
    from archipel.simulation import RoundRow, Tuning
    from archipel.simulation.tuning import Trial


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE",
              help="In place of the file's: --set cohort=20 --set tune.pruner=hyperband")  # fmt: skip
@click.option("--trials", type=click.IntRange(1), help="How many, in place of the file's tune.trials.")
@click.option("--budget", type=click.IntRange(1), help="Rounds of all trials together, after which none begins.")
@click.option("--workers", type=click.IntRange(1), help="How many processes a trial has, in place of the file's.")
@click.option("--folder", type=click.Path(path_type=Path),
              help="Keeps the trials; the same command goes on there. Default: NAME-tuning beside FILE.")  # fmt: skip
@click.option("--output", "-o", type=click.Path(dir_okay=False, path_type=Path),
              help="Write FILE with the best values here, beside it. Default: NAME-tuned.toml.")  # fmt: skip
@click.option("--plot", "plot_file", type=click.Path(path_type=Path),
              help="Draw trials and settings into this .png, .svg, .pdf.")  # fmt: skip
@as_json
def tune(
    file: Path,
    settings: tuple[str, ...],
    trials: int | None,
    budget: int | None,
    workers: int | None,
    folder: Path | None,
    output: Path | None,
    plot_file: Path | None,
    as_json: bool,
) -> None:
    """Find good rates and other settings for the federation of FILE: runs with values that its table [tune] allows.

    \b
    archipel tune federation.toml
    archipel tune federation.toml --trials 40 --plot tuning.png
    archipel tune federation.toml --budget 500 --set tune.pruner=hyperband

    \b
    [tune]
    trials = 30
    lr = { low = 0.001, high = 1.0, log = true }       # a hyperparameter, as a task has it
    server_lr = { low = 0.1, high = 3.0, log = true }
    strategy.mu = [0.0, 0.01, 0.1]                     # any other setting of the file, by its key
    cohort = { low = 5, high = 20 }

    Optuna proposes the values. Every trial is simulated; one that does worse than others after as many rounds is ended
    early. The best values are written as a federation's file that `archipel simulate` runs.

    Ctrl-C ends after the present round; the same command goes on from there, also after a kill.
    """
    if plot_file is not None:
        check_plot_name(plot_file)
    check_target(plot_file, "matplotlib", "tuning")
    from archipel.simulation.tuning import check_target_file, write_best
    from archipel.simulation.tuning import tune as run

    output = file.with_name(f"{file.stem}-tuned.toml") if output is None else output
    check_target_file(file, output)
    folder = file.with_name(f"{file.stem}-tuning") if folder is None else folder
    more = (("tune.trials", trials), ("tune.budget", budget), ("run.workers", workers))
    given = [*settings, *(f"{key}={value}" for key, value in more if value)]
    with (
        catch_ctrl_c(f"the trials are in {quote(str(folder))}; the same command goes on from there") as check,
        progress_line() as tell,
    ):
        stopped = False

        def on_trial(trial: Trial) -> None:
            if not as_json:
                tell("")
                click.echo(_line(trial))

        def on_round(trial: Trial, row: RoundRow) -> bool:
            nonlocal stopped
            tell(f"trial {trial.number}, round {row.number}: {_values(trial.values)}")
            try:
                check()
            except KeyboardInterrupt:
                stopped = True  # the trial ends after it has written how far it is
            return not stopped

        found = run(file, settings=given, folder=folder, on_trial=on_trial, on_round=on_round)
        tell("")
        if stopped:
            raise KeyboardInterrupt
    write_best(found, file, output, settings)
    if plot_file is not None:
        found.plot(plot_file)
    show(_Summary.of(found), as_json, _last_lines(found, output, plot_file))


class _Row(msgspec.Struct):
    """A trial for --json."""

    number: int
    values: dict[str, float | int | str | bool]
    rounds: int
    value: float | None
    state: str


class _Summary(msgspec.Struct, kw_only=True):
    """What --json prints."""

    metric: str
    best: _Row
    rounds: int
    trials: list[_Row]

    @classmethod
    def of(cls, found: Tuning) -> _Summary:
        rows = [_row(trial) for trial in found.trials]
        return cls(metric=found.metric, best=_row(found.best), rounds=found.rounds, trials=rows)


def _row(trial: Trial) -> _Row:
    return _Row(trial.number, dict(trial.values), trial.rounds, trial.value, trial.state)


def _line(trial: Trial) -> str:
    value = "no number" if trial.value is None else f"{trial.value:.6g}"
    ended = "" if trial.state == "complete" else ", ended early"
    rounds = f"{trial.rounds} round{'' if trial.rounds == 1 else 's'}"
    return f"trial {trial.number:>3}: {value:>10} after {rounds}{ended}: {_values(trial.values)}"


def _values(values: Mapping[str, object]) -> str:
    texts = {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in values.items()}
    return ", ".join(f"{name} {text}" for name, text in texts.items())


def _last_lines(found: Tuning, output: Path, plot_file: Path | None) -> list[str]:
    early = sum(trial.state == "pruned" for trial in found.trials)
    return [
        f"{len(found.trials)} trials, {early} of them ended early, {found.rounds} rounds in all",
        f"best {found.metric}: {found.best.value:.6g}, trial {found.best.number}: {_values(found.best.values)}",
        *(f"written to {file}" for file in (output, plot_file) if file is not None),
    ]
