"""The local rounds of one device after the other in this process, with sessions that stay open."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from archipel.bundle import Bundle
from archipel.errors import ArchipelError, NonFiniteLossError, ProtocolError, SimulationError
from archipel.lite_runtime.engines.delegates import Delegates
from archipel.lite_runtime.engines.sessions import Sessions
from archipel.lite_runtime.training.driver import collect_data, need_program, run_round
from archipel.lite_runtime.values import Values
from archipel.protocol.metrics.training_metrics import training_arrays
from archipel.simulation.clients import Clients
from archipel.simulation.draws import device_seed
from archipel.simulation.states import States
from archipel.simulation.work import Partial, Report, Work


class OneByOne:
    """Runs what `Runtime.local_round` runs, for any program of any bundle.

    Arguments:
        bundle: with a schedule and `finish`.
        clients: the devices' examples.
        states: what devices keep from round to round.
        threads: inside one operator.
        delegates: what runs the operators, as for `load`.
    """

    def __init__(
        self, bundle: Bundle, clients: Clients, states: States, *, threads: int = 1, delegates: Delegates = "cpu"
    ) -> None:
        if not bundle.manifest.schedule:
            raise SimulationError(f"bundle {bundle.manifest.name!r} has no schedule, so no local round")
        self._bundle, self._clients, self._states = bundle, clients, states
        self._finish = bundle.program(need_program(bundle, "finish", "take part in a round"))
        self._sessions = Sessions(bundle, threads, delegates)

    def run(self, work: Work, clients: Sequence[int]) -> Partial:
        """The sum of these devices' updates. One that diverges drops out, as a real one does.

        Raises SimulationError that names the client whose examples do not fit.
        """
        partial = Partial(work.empty_sum())
        for number in clients:
            report = Report(number)
            try:
                self._run_one(work, number, partial, report)
            except (NonFiniteLossError, ProtocolError) as error:
                report.left = str(error)
            except ArchipelError as error:
                raise SimulationError(f"client {number}, round {work.number}: {error}") from None
            partial.reports.append(report)
        return partial

    def with_states(self, states: States) -> OneByOne:
        """The same engine, with its open sessions, for devices that keep other states."""
        other = copy.copy(self)
        other._states = states
        return other

    def close(self) -> None:
        """There is nothing to end."""

    def _run_one(self, work: Work, number: int, partial: Partial, report: Report) -> None:
        bundle = self._bundle
        fields = collect_data(bundle, bundle.manifest.schedule, self._clients.take(number), None)
        state = self._states.load(number, work.number)
        values = Values(
            bundle,
            work.parameters,
            state,
            broadcast=work.broadcast,
            hyperparameters=work.hyperparameters,
            seed=device_seed(work.seed, work.number, number),
            examples=fields.count,
        )
        update = run_round(self._sessions, bundle, values, fields)
        report.examples, report.steps = update.examples, update.steps
        report.loss = update.metrics.get("loss")
        own = training_arrays(bundle.manifest, self._finish, update.arrays, update.metrics)
        partial.total.add({**update.arrays, **own}, number)
        values.keep()
        self._states.save(number, work.number, state, work.saved)
