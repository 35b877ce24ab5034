"""`tune`: runs of a simulation with other settings each, of which the worse ones are ended early."""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import msgspec

from archipel.errors import SimulationError
from archipel.simulation.result import Result
from archipel.simulation.rounds import RoundRow
from archipel.simulation.saved import held
from archipel.simulation.tuning.file import FederationRuns
from archipel.simulation.tuning.result import Trial, Tuning
from archipel.simulation.tuning.settings import TuneSettings, Value, is_lower_better
from archipel.simulation.tuning.study import Study

TRIALS = "trials.db"


class Simulation(Protocol):
    """Runs a federation with these values, and calls `on_round` after each round, which ends the run by False.

    With a folder the run keeps there how far it is, and goes on from there.
    """

    def __call__(
        self, values: Mapping[str, Value], folder: Path | None, on_round: Callable[[RoundRow], object]
    ) -> Result: ...


def tune(
    simulation: Path | str | Simulation,
    tuning: TuneSettings | None = None,
    *,
    rounds: int | None = None,
    seed: int = 0,
    settings: Sequence[str] = (),
    folder: Path | str | None = None,
    on_trial: Callable[[Trial], object] | None = None,
    on_round: Callable[[Trial, RoundRow], object] | None = None,
) -> Tuning:
    """Try settings of a federation, those that do worse for fewer rounds, and say which did best.

    Arguments:
        simulation: a federation's file; or a function of the trial's values by name, a folder or None, and a function
            that it passes on as `on_round`, which calls `archipel.simulate` and returns its Result.
        tuning: what is tuned, and for how long; None: what the file's [tune] says.
        rounds: of a trial that runs to its end, for a function; a file says it itself.
        seed: decides all proposals, for a function; a file says it itself. With the same seed the trials are the same.
        settings: KEY=VALUE in place of the file's, as for `load_federation`.
        folder: keeps the trials (SQLite) and how far the present one is; a call with the same folder goes on.
        on_trial: called with each trial that has ended.
        on_round: called after each round; if it returns False, the tuning ends there, and goes on with the folder.

    Raises SimulationError; MissingExtraError without `archipel[tuning]`; what a trial's simulation raises.

    Example:
        found = archipel.simulation.tune("federation.toml", folder="tuning")
        print(found.best.values, found.best.value)
    """
    if isinstance(simulation, str | Path):
        runs = FederationRuns(Path(simulation), settings, None if folder is None else Path(folder) / "bundles")
        tuning, rounds, seed, what = tuning or runs.tuning, runs.rounds, runs.seed, runs.digest
        tuning = msgspec.structs.replace(tuning, metric=tuning.metric or runs.default_metric())
        simulation = runs
    else:
        if tuning is None or rounds is None:
            raise SimulationError("tune: a function needs tuning=TuneSettings(...) and rounds=")
        if not tuning.metric:
            raise SimulationError('tune: say which metric decides, such as metric="test accuracy"')
        what = ""
    lower = is_lower_better(tuning, tuning.metric)
    # More trials, or a larger budget, go on with the same ones.
    same = msgspec.structs.replace(tuning, trials=1, budget=None)
    digest = hashlib.sha256(f"{what} {rounds} {seed} {lower} ".encode() + msgspec.json.encode(same)).hexdigest()
    with ExitStack() as stack:
        where = None if folder is None else Path(folder)
        if where is not None:
            stack.enter_context(held(where))
        study = Study(
            None if where is None else where / TRIALS, tuning, lower=lower, rounds=rounds, seed=seed, what=digest
        )
        stack.callback(study.close)
        while _begins(study.trials(), tuning):
            number, values = study.next()
            stopped = _run(study, number, values, simulation, tuning.metric, rounds, where, on_round)
            if stopped:
                break
            if on_trial is not None:
                on_trial(study.trials()[number])
        return Tuning(tuning, tuning.metric, lower, study.trials())


def metric_of(row: RoundRow, wanted: str) -> float | None:
    """The metric after a round; None where the round did not measure. Raises SimulationError for another name."""
    from archipel.operator.curves import FIGURES

    found = {
        **row.metrics,
        **{f"test {each}": value for each, value in row.tested.items()},
        **{f"{each} {name}": figure(spread) for each, spread in row.spread.items() for name, figure in FIGURES.items()},
    }
    if wanted in found:
        return found[wanted]
    if row.failed:
        return None
    if (wanted.startswith("test ") and not row.tested) or (wanted.endswith(tuple(FIGURES)) and not row.spread):
        return None  # not every round is measured
    raise SimulationError(f"tune.metric: no {wanted!r}; there are {', '.join(sorted(found)) or 'none'}")


def _begins(trials: Sequence[Trial], tuning: TuneSettings) -> bool:
    """Whether a trial goes on or begins."""
    if any(trial.state == "running" for trial in trials):
        return True
    spent = sum(trial.rounds for trial in trials)
    return len(trials) < tuning.trials and (tuning.budget is None or spent < tuning.budget)


def _run(
    study: Study,
    number: int,
    values: Mapping[str, Value],
    simulation: Simulation,
    metric: str,
    rounds: int,
    where: Path | None,
    on_round: Callable[[Trial, RoundRow], object] | None,
) -> bool:
    """One trial. Returns whether the caller stopped it."""
    stopped, ended = False, False

    def follow(row: RoundRow) -> bool:
        nonlocal stopped, ended
        value = metric_of(row, metric)
        if value is not None and row.number < rounds:
            ended = not study.report(number, row.number, value)
        if on_round is not None:
            stopped = on_round(Trial(number, values, row.number, value, "running"), row) is False
        return not (ended or stopped)

    own = None if where is None else where / f"trial-{number}"
    result = simulation(values, own, follow)
    if not ended:
        if len(result.history) < rounds:
            return True
        value = _last_value(result, metric)
        if value is not None and math.isfinite(value):
            study.note(number, rounds, value)
        study.complete(number, value)
    if own is not None:
        shutil.rmtree(own, ignore_errors=True)
    return stopped


def _last_value(result: Result, metric: str) -> float | None:
    """The metric after the last round, which is measured in any case unless it failed."""
    return next((value for row in reversed(result.history) if (value := metric_of(row, metric)) is not None), None)
