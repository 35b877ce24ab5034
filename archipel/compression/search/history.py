"""The trials of a search: Optuna's TPE proposes them, an SQLite file keeps them.

A finished trial enters the file in one transaction, so that no half-done trial is ever read. A proposal depends only on
the seed, the trial's number and the trials before it, so a search goes on after a kill as if nothing had happened.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from archipel.errors import CompressionError, MissingExtraError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

    from archipel.compression.search.space import Space

Direction = Literal["minimize", "maximize"]
STUDY = "archipel"
STARTUP = 10
"""Trials before TPE models them; until then proposals are random."""


@dataclass(frozen=True)
class Trial:
    """Values of the space's parameters, and the number of the point that they led to: 0 is the original.

    `error`: why the recipe could not be applied; `point` is then that of the recipe without fine-tuning, or None.
    `new`: no earlier trial led to the same point.
    """

    values: Mapping[str, Any]
    point: int | None
    new: bool
    error: str = ""


@dataclass(frozen=True)
class Outcome:
    """The result of a trial: OBJECTIVES, all to be minimized, and the excess over each condition, met if at most 0."""

    objectives: tuple[float, ...]
    excesses: Mapping[str, float]


OBJECTIVES = ("quality", "size", "latency", "flops")


class History:
    """The trials so far. The OBJECTIVES in `used` guide the proposals.

    Raises MissingExtraError without Optuna, CompressionError for a file that has no such trials.
    """

    def __init__(self, path: Path, space: Space, seed: int, used: Sequence[str]) -> None:
        try:
            import optuna
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "optuna":
                raise
            raise MissingExtraError("optuna", "search") from None
        self._optuna = optuna
        self._distributions: dict[str, BaseDistribution] = space.distributions()
        self._seed = seed
        self._used = [OBJECTIVES.index(name) for name in used]
        with quiet_optuna():
            try:
                self._storage = optuna.storages.RDBStorage(f"sqlite:///{path.resolve()}")
                directions: list[Direction] = ["minimize"] * len(OBJECTIVES)
                self._study = optuna.create_study(
                    study_name=STUDY, storage=self._storage, load_if_exists=True, directions=directions
                )
            except Exception as error:
                # SQLAlchemy, Alembic and Optuna each raise exceptions of their own.
                why = str(error).partition("\n")[0]
                raise CompressionError(f"{path}: not the trials of a search ({why}); choose another folder") from error
        self.trials: list[Trial] = [_read(trial) for trial in self._study.get_trials(deepcopy=False)]

    def close(self) -> None:
        self._storage.remove_session()
        self._storage.engine.dispose()

    def propose(self, outcomes: Sequence[Outcome | None]) -> dict[str, Any]:
        """Values for the next trial, from the outcomes of all trials before (None: the recipe failed)."""
        number = len(self.trials)
        digest = hashlib.sha256(f"{self._seed}/{number}".encode()).digest()
        optuna = self._optuna
        # A new study in memory for each proposal: the target, and with it the objectives, may differ from call to call,
        # and a sampler with this seed carries no state over.
        with quiet_optuna():
            sampler = optuna.samplers.TPESampler(seed=int.from_bytes(digest[:4], "little"), n_startup_trials=STARTUP)
            study = optuna.create_study(sampler=sampler, directions=["minimize"] * len(self._used))
            study.add_trials([self._frozen(t, outcome, self._used) for t, outcome in zip(self.trials, outcomes)])
            return dict(study.ask(self._distributions).params)

    def add(self, trial: Trial, outcome: Outcome | None) -> None:
        with quiet_optuna():
            self._study.add_trial(self._frozen(trial, outcome, range(len(OBJECTIVES))))
        self.trials.append(trial)

    def _frozen(self, trial: Trial, outcome: Outcome | None, objectives: Iterable[int]) -> FrozenTrial:
        states = self._optuna.trial.TrialState
        return self._optuna.trial.create_trial(
            state=states.FAIL if outcome is None else states.COMPLETE,
            values=None if outcome is None else [outcome.objectives[place] for place in objectives],
            params=dict(trial.values),
            distributions=self._distributions,
            user_attrs={"point": trial.point, "new": trial.new, "error": trial.error},
            constraints=None if outcome is None else dict(outcome.excesses),
        )


def _read(trial: FrozenTrial) -> Trial:
    return Trial(dict(trial.params), trial.user_attrs["point"], trial.user_attrs["new"], trial.user_attrs["error"])


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Silence Optuna, which logs every study that is created: here one for each trial."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)
