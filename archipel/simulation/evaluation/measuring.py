"""Measures the model on every device's own examples, with the device's own tensors where the model has such."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipel.bundle import Bundle
from archipel.bundle.roles import Personal, State
from archipel.errors import ArchipelError, SimulationError
from archipel.lite_runtime import Runtime
from archipel.lite_runtime.learned import join_names
from archipel.protocol.messages.distributions import Bins
from archipel.protocol.metrics.distributions import default_bins, distribution_from_counts, distribution_of
from archipel.protocol.metrics.measures import Measured, measured, measures
from archipel.protocol.operator.results import Distribution
from archipel.protocol.uploads import upload_program
from archipel.simulation.clients import Clients
from archipel.simulation.draws import draw_cohort
from archipel.simulation.evaluation.settings import Evaluation
from archipel.simulation.several import SeveralModels
from archipel.simulation.states import States


class DeviceTests:
    """The devices' evaluations.

    Arguments:
        model: a bundle with `evaluate`, or those of devices with different models.
        clients: the devices' examples to measure on.
        settings: which devices, and the bins.
        seed: the run's.
        threads: inside one operator.

    Raises SimulationError where no device has examples, and for bins of a metric that the bundle does not measure;
    ProtocolError without an evaluate program.
    """

    def __init__(
        self, model: Bundle | SeveralModels, clients: Clients, settings: Evaluation, seed: int, threads: int = 1
    ) -> None:
        self._clients, self._every = clients, settings.every
        several = model if isinstance(model, SeveralModels) else None
        bundles = (model,) if isinstance(model, Bundle) else model.bundles
        self._of = None if several is None else several.of
        bundle = bundles[0]
        self._program = upload_program(bundle.manifest, "evaluation")
        names = sorted(measures(self._program))
        for name in settings.bins:
            if name not in names:
                raise SimulationError(f"evaluation.bins.{name}: the model measures {', '.join(names)}")
        self.bins: dict[str, Bins] = {name: settings.bins.get(name, default_bins(name)) for name in names}
        population = len(clients)
        wanted = population if settings.devices is None else min(settings.devices, population)
        # Round 0 has no cohort, so this draw is nobody else's.
        drawn = range(population) if wanted == population else draw_cohort(population, wanted, seed, 0).tolist()
        self._asked = [number for number in drawn if clients.count(number)]
        if not self._asked:
            raise SimulationError("evaluation.hold_out: no device has an example to be measured on; each has one alone")
        self._runtimes = [Runtime(each, threads=threads, delegates="cpu") for each in bundles]
        # Where devices have none of their own, all answer alike and no state is read.
        self._own = has_own_tensors(bundle)

    def is_due(self, number: int, last: bool) -> bool:
        """Whether devices measure the model after round `number`."""
        return last or number % self._every == 0

    def measure(self, parameters: Mapping[str, NDArray[Any]], states: States, number: int) -> dict[int, Measured]:
        """What each asked device measures after round `number`, by its number.

        Raises SimulationError that names the device whose examples do not fit.
        """
        for runtime in self._runtimes:
            runtime.set_parameters({name: np.asarray(array) for name, array in parameters.items()})
        found = {}
        for client in self._asked:
            runtime = self._runtimes[0 if self._of is None else self._of[client]]
            if self._own:
                state = states.load(client, number + 1)
                runtime.reset("personal")
                runtime.reset("state")
                runtime.restore(join_names({"personal": state.personal, "state": state.state}))
            fields = self._clients.take(client)
            count = len(next(iter(fields.values())))
            try:
                metrics = runtime.evaluate(dict(fields))
            except ArchipelError as error:
                raise SimulationError(f"client {client}, evaluation after round {number}: {error}") from None
            found[client] = measured(self._program, metrics, count)
        return found

    def describe(self, found: Mapping[int, Measured]) -> tuple[dict[str, Distribution], dict[str, Distribution]]:
        """Each metric's distribution over the devices that have a finite value: exactly, and as a server would learn
        it, from counts in bins."""
        exact, binned = {}, {}
        for name, bins in self.bins.items():
            values = [each.values[name] for each in found.values() if np.isfinite(each.values.get(name, np.nan))]
            if values:
                exact[name] = distribution_of(values, bins)
                binned[name] = distribution_from_counts(bins, np.array(exact[name].counts))
        return exact, binned


def has_own_tensors(bundle: Bundle) -> bool:
    """Whether a device predicts with tensors of its own, such as personal layers or the model that it chose."""
    return any(
        isinstance(port, Personal | State)
        for program in bundle.manifest.programs.values()
        if program.kind in ("predict", "evaluate", "refresh")
        for port in program.inputs
    )
