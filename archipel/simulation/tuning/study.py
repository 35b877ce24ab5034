"""The trials of a tuning: Optuna proposes values and ends trials early, an SQLite file keeps both.

A proposal depends only on the seed, the trial's number and the trials before it, so a tuning goes on after a kill to
the same trials.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from archipel.errors import MissingExtraError, SimulationError
from archipel.simulation.tuning.result import Trial
from archipel.simulation.tuning.settings import Range, TuneSettings, Value

if TYPE_CHECKING:
    import optuna

_NAME = "archipel"
_STARTUP = 8
"""Trials before TPE models them; until then proposals are random."""
_WHAT = "what"
"""The study's attribute that says what is tuned."""


class Study:
    """The trials so far.

    Arguments:
        file: an SQLite file, made where it does not exist; None: in memory.
        settings, lower, seed: of the tuning.
        rounds: of a whole trial.
        what: a digest of everything else that decides a trial.

    Raises MissingExtraError without Optuna; SimulationError for a file that has other trials, or none, or a trial with
    other settings or values than the ranges allow.
    """

    def __init__(
        self, file: Path | None, settings: TuneSettings, *, lower: bool, rounds: int, seed: int, what: str
    ) -> None:
        try:
            import optuna
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "optuna":
                raise
            raise MissingExtraError("optuna", "tuning") from None
        self._optuna, self._settings, self._seed = optuna, settings, seed
        self._direction: Literal["minimize", "maximize"] = "minimize" if lower else "maximize"
        self._distributions = {name: _distribution(optuna, asked) for name, asked in settings.ranges.items()}
        self._storage: Any = None
        try:
            with _quiet_optuna():
                if file is None:
                    self._storage = optuna.storages.InMemoryStorage()
                else:
                    self._storage = optuna.storages.RDBStorage(f"sqlite:///{file.resolve()}")
                self._study = optuna.create_study(
                    study_name=_NAME, storage=self._storage, load_if_exists=True, direction=self._direction,
                    pruner=_pruner(optuna, settings, rounds),
                )  # fmt: skip
                before = self._study.user_attrs.get(_WHAT)
                if before is None:
                    self._study.set_user_attr(_WHAT, what)
        except Exception as error:
            # SQLAlchemy, Alembic and Optuna each raise exceptions of their own.
            why = str(error).partition("\n")[0]
            raise SimulationError(f"{file}: not the trials of a tuning ({why}); give another folder") from error
        if before not in (None, what):
            raise SimulationError(f"{file}: has a tuning of other settings; give another folder, or remove it")
        self._check_values(file)

    def _check_values(self, file: Path | None) -> None:
        # A trial's values become settings of the federation's file, which can name code: whoever may write the folder
        # must not choose them.
        for each in self._study.get_trials(deepcopy=False):
            try:
                self._running_trial(each.params)
            except ValueError:
                raise SimulationError(
                    f"{file}: trial {each.number} has other settings or values than [tune] allows; give another "
                    "folder, or remove it"
                ) from None

    def close(self) -> None:
        engine = getattr(self._storage, "engine", None)
        if engine is not None:
            self._storage.remove_session()
            engine.dispose()

    def trials(self) -> list[Trial]:
        """All trials, oldest first."""
        return [self._read(each) for each in self._study.get_trials(deepcopy=False)]

    def next(self) -> tuple[int, Mapping[str, Value]]:
        """The trial that was stopped, or a new one: its number and values."""
        states = self._optuna.trial.TrialState
        trials = self._study.get_trials(deepcopy=False)
        for each in trials:
            if each.state == states.RUNNING:
                return each.number, dict(each.params)
        digest = hashlib.sha256(f"{self._seed}/{len(trials)}".encode()).digest()
        with _quiet_optuna():
            # In memory, with a sampler that carries no state over; then the trial enters the file as a whole.
            sampler = self._optuna.samplers.TPESampler(
                seed=int.from_bytes(digest[:4], "little"), n_startup_trials=_STARTUP
            )
            proposing = self._optuna.create_study(sampler=sampler, direction=self._direction)
            proposing.add_trials(trials)
            values = dict(proposing.ask(self._distributions).params)
            self._study.add_trial(self._running_trial(values))
        return len(trials), values

    def _running_trial(self, values: Mapping[str, Value]) -> optuna.trial.FrozenTrial:
        """Raises ValueError unless the values are of the settings that are tuned, and in their ranges."""
        return self._optuna.trial.create_trial(
            state=self._optuna.trial.TrialState.RUNNING, params=dict(values), distributions=self._distributions
        )

    def report(self, number: int, rounds: int, value: float) -> bool:
        """Note the metric after so many rounds of a trial; whether the trial is to go on. If not, it is ended."""
        self.note(number, rounds, value)
        trial = self._running(number)
        with _quiet_optuna():
            ends = not math.isfinite(value) or (self._settings.pruner != "none" and trial.should_prune())
        if ends:
            self._tell(number, self._optuna.trial.TrialState.PRUNED, None)
        return not ends

    def note(self, number: int, rounds: int, value: float) -> None:
        """Note the metric after so many rounds of a trial, unless it is there: a run that was killed says it again."""
        if rounds not in self._study.get_trials(deepcopy=False)[number].intermediate_values:
            self._running(number).report(value, rounds)

    def complete(self, number: int, value: float | None) -> None:
        """End a trial that ran to its end; without a value it was of no use."""
        states = self._optuna.trial.TrialState
        known = value is not None and math.isfinite(value)
        self._tell(number, states.COMPLETE if known else states.PRUNED, value if known else None)

    def _tell(self, number: int, state: Any, value: float | None) -> None:
        with _quiet_optuna():
            self._study.tell(self._running(number), value, state=state)

    def _running(self, number: int) -> optuna.trial.Trial:
        frozen = self._study.get_trials(deepcopy=False)[number]
        return self._optuna.trial.Trial(self._study, frozen._trial_id)

    def _read(self, trial: optuna.trial.FrozenTrial) -> Trial:
        states = self._optuna.trial.TrialState
        state = {states.COMPLETE: "complete", states.RUNNING: "running"}.get(trial.state, "pruned")
        rounds = trial.last_step or 0
        value = trial.intermediate_values.get(rounds)
        known = value is not None and math.isfinite(value)
        return Trial(trial.number, dict(trial.params), rounds, value if known else None, state)  # type: ignore[arg-type]


def _distribution(optuna: Any, asked: Range | list[Value]) -> Any:
    if not isinstance(asked, Range):
        return optuna.distributions.CategoricalDistribution(asked)
    kind = optuna.distributions.IntDistribution if asked.whole else optuna.distributions.FloatDistribution
    return kind(asked.low, asked.high, log=asked.log)


def _pruner(optuna: Any, settings: TuneSettings, rounds: int) -> Any:
    least = min(settings.least_rounds or max(1, rounds // settings.reduction**2), rounds)
    if settings.pruner == "none":
        return optuna.pruners.NopPruner()
    if settings.pruner == "hyperband":
        return optuna.pruners.HyperbandPruner(least, rounds, settings.reduction)
    return optuna.pruners.SuccessiveHalvingPruner(least, settings.reduction)


def _quiet_optuna() -> AbstractContextManager[None]:
    # Imported here, because a simulation without tuning needs no modules of compression.
    from archipel.compression.search.history import quiet_optuna

    return quiet_optuna()
