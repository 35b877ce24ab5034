"""Trials of a federation's file: each is the file with other values."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from archipel.bundle import Bundle
from archipel.errors import SimulationError
from archipel.graph import Model
from archipel.protocol.metrics.measures import measures
from archipel.protocol.uploads import upload_program
from archipel.simulation.federation import Federation, Prepared, load_federation
from archipel.simulation.federation_parts.settings import RunPart, Settings
from archipel.simulation.result import Result
from archipel.simulation.rounds import RoundRow
from archipel.simulation.simulate import as_bundle
from archipel.simulation.tuning.settings import TuneSettings, Value, as_settings, read_tuning

_EACH_RUN = ("rounds", "cohort", "dropout", "privacy", "hyperparameters", "run", "tune", "task", "system", "attack",
             "aggregation", "secure_groups", "evaluation")  # fmt: skip
"""What data and model do not depend on, so that they are read once for all trials that differ in these alone."""


class FederationRuns:
    """Runs a federation's file with a trial's values.

    Arguments:
        file, settings: as of `load_federation`.
        bundles: a folder for what models are converted to; None: none is kept.

    Raises SimulationError, also where the file has no [tune].
    """

    def __init__(self, file: Path, settings: Sequence[str] = (), bundles: Path | None = None) -> None:
        self._file, self._settings, self._bundles = file, list(settings), bundles
        self._federation = load_federation(file, self._settings)
        if not self._federation.settings.tune:
            raise SimulationError(
                f"{file}: tune: is missing; give a table [tune] with lr = {{ low = 0.01, high = 1.0, log = true }}, say"
            )
        self.tuning: TuneSettings = read_tuning(self._federation.settings.tune)
        self.rounds, self.seed = self._federation.settings.rounds, self._federation.settings.seed
        self._prepared: tuple[str, Prepared] | None = None

    @property
    def digest(self) -> str:
        """Of everything in the file that decides a trial but what is tuned."""
        rest = msgspec.structs.replace(self._federation.settings, tune={}, run=RunPart())
        return hashlib.sha256(repr(rest).encode()).hexdigest()

    def default_metric(self) -> str:
        """Of the test data the accuracy, else the loss; without them the mean over devices."""
        prepared = self._prepare(self._federation)
        evaluated = self._federation.settings.evaluation is not None
        if prepared.test is None and not evaluated:
            raise SimulationError(
                f"{self._file}: tune: nothing measures the model; give data.hold_out = 0.1, data.test or [evaluation]"
            )
        names, first = ["loss"], prepared.model[0] if isinstance(prepared.model, list) else prepared.model
        if isinstance(first, Bundle):
            names = list(measures(upload_program(first.manifest, "evaluation")))
        name = next((each for each in ("accuracy", "loss") if each in names), names[0])
        return f"test {name}" if prepared.test is not None else f"{name} mean over devices"

    def __call__(
        self, values: Mapping[str, Value], folder: Path | None, on_round: Callable[[RoundRow], object]
    ) -> Result:
        federation = self.trial(values, folder)
        return federation.run_prepared(self._prepare(federation), on_round)

    def trial(self, values: Mapping[str, Value], folder: Path | None = None) -> Federation:
        """The federation with these values, which keeps how far it is in the folder, or nowhere: never in the folder
        of the file, where another trial would go on."""
        given = [*self._settings, *as_settings(values, Settings.__struct_fields__)]
        federation = load_federation(self._file, given)
        own = msgspec.structs.replace(
            federation.settings.run, folder=None if folder is None else str(folder.absolute())
        )
        return replace(federation, settings=msgspec.structs.replace(federation.settings, run=own))

    def _prepare(self, federation: Federation) -> Prepared:
        settings = federation.settings
        key = repr({name: getattr(settings, name) for name in Settings.__struct_fields__ if name not in _EACH_RUN})
        if self._prepared is None or self._prepared[0] != key:
            prepared = federation.prepare()
            training = prepared.training
            if training is not None:
                if self._bundles is not None and self._prepared is not None:
                    # No other trial needs what was made for the one before.
                    shutil.rmtree(self._bundles, ignore_errors=True)
                given = prepared.model if isinstance(prepared.model, list) else [prepared.model]
                made: list[Model | Bundle] = [
                    as_bundle(each, training, self._bundles) if isinstance(each, Model) else each for each in given
                ]
                model = made if isinstance(prepared.model, list) else made[0]
                prepared = replace(prepared, model=model, training=None)
            self._prepared = key, prepared
        return self._prepared[1]
