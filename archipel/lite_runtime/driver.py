"""The one way to run a bundle's programs: `begin`, the phases of a schedule, `finish`, by the roles of their ports.

Nothing here knows any algorithm. What a federated algorithm does on a device is in the programs and in which roles
their inputs and outputs have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from archipel.bundle import Bundle, Phase
from archipel.bundle.roles import ExampleWeight, Metric, Parameter, Personal, Port, State, Update
from archipel.errors import NonFiniteLossError, RuntimeInputError, RuntimeProgramError
from archipel.lite_runtime.fields import FIELD_ROLES, Fields, collect, fixed_rows
from archipel.lite_runtime.loop import TrainLoop
from archipel.lite_runtime.results import MetricTable, Progress, loss_of
from archipel.lite_runtime.sessions import Sessions
from archipel.lite_runtime.shuffle import batches
from archipel.lite_runtime.values import Values

_KEPT = (Parameter, Personal, State)

OnStep = Callable[[Progress], object]
OnEpoch = Callable[[], None]


class Training:
    """What a run of phases leaves: losses and metrics per step, which examples were used, whether it was stopped."""

    def __init__(self, count: int) -> None:
        self.losses: list[float] = []
        self.metrics = MetricTable()
        self.used = np.zeros(count, dtype=bool)
        self.stopped = False

    @property
    def examples(self) -> int:
        return int(np.count_nonzero(self.used))


def find_program(bundle: Bundle, kind: str) -> str | None:
    """The name of the program of that kind: the one called like its kind, else the only one, None if there is none.

    Raises RuntimeProgramError if there are several and none is called like the kind.
    """
    names = [name for name, program in bundle.manifest.programs.items() if program.kind == kind]
    if kind in names:
        return kind
    if len(names) > 1:
        raise RuntimeProgramError(
            f"bundle {bundle.manifest.name!r} has several {kind} programs ({', '.join(sorted(names))}); name one"
        )
    return names[0] if names else None


def need_program(bundle: Bundle, kind: str, purpose: str) -> str:
    """As `find_program`, but raises RuntimeProgramError that names the `purpose` if there is none."""
    name = find_program(bundle, kind)
    if name is None:
        raise RuntimeProgramError(
            f"bundle {bundle.manifest.name!r} has no {kind} program, so it cannot {purpose}; convert it with one"
        )
    return name


def data_ports(bundle: Bundle, schedule: Sequence[Phase]) -> list[Port]:
    """The fields that the schedule's programs read, each once."""
    ports: dict[str, Port] = {}
    for phase in schedule:
        for port in bundle.program(phase.program).inputs:
            if isinstance(port, FIELD_ROLES):
                ports.setdefault(port.name, port)
    return list(ports.values())


def collect_data(
    bundle: Bundle,
    schedule: Sequence[Phase],
    x: np.ndarray | Mapping[str, np.ndarray],
    y: np.ndarray | None,
) -> Fields:
    """The local data for all phases, checked. Raises RuntimeInputError."""
    return collect("local data", data_ports(bundle, schedule), x, y)


def run_once(sessions: Sessions, bundle: Bundle, name: str, values: Values) -> dict[str, np.ndarray]:
    """Run a program that reads no data (begin, finish, refresh): its outputs by name.

    New parameters, personal tensors and state among them go to `values`.
    """
    program = bundle.program(name)
    feed = {port.name: np.asarray(values.read(port), order="C") for port in program.inputs}
    names = [port.name for port in program.outputs]
    outputs = dict(zip(names, sessions.get(name).run(names, feed)))
    for port in program.outputs:
        if isinstance(port, _KEPT):
            values.write(port, outputs[port.name])
    return outputs


def run_phases(
    sessions: Sessions,
    bundle: Bundle,
    schedule: Sequence[Phase],
    values: Values,
    fields: Fields,
    *,
    shuffle: bool = True,
    on_step: OnStep | None = None,
    on_epoch: OnEpoch | None = None,
) -> Training:
    """Train through the phases in order; `values` has the result, also when a loss that is not finite ends it.

    `on_step` is called after every step and stops all phases by returning True; `on_epoch` after every pass over the
    data, when `values` is up to date.
    """
    training = Training(fields.count)
    for index, phase in enumerate(schedule):
        if training.stopped:
            break
        _run_phase(sessions, bundle, index, phase, values, fields, training, shuffle, on_step, on_epoch)
    values.examples = training.examples
    return training


def finish(sessions: Sessions, bundle: Bundle, values: Values) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Run `finish`: the update by output name, and its metrics."""
    name = need_program(bundle, "finish", "take part in a round")
    outputs = run_once(sessions, bundle, name, values)
    ports = bundle.program(name).outputs
    update = {port.name: outputs[port.name] for port in ports if isinstance(port, Update)}
    for output, array in update.items():
        if not np.isfinite(array).all():
            raise NonFiniteLossError(f"program {name!r}: update {output!r} has values that are not finite")
    return update, {port.name: float(outputs[port.name]) for port in ports if isinstance(port, Metric)}


def _run_phase(
    sessions: Sessions,
    bundle: Bundle,
    index: int,
    phase: Phase,
    values: Values,
    fields: Fields,
    training: Training,
    shuffle: bool,
    on_step: OnStep | None,
    on_epoch: OnEpoch | None,
) -> None:
    program = bundle.program(phase.program)
    rows = fixed_rows(port for port in program.inputs if isinstance(port, FIELD_ROLES))
    if rows not in (None, phase.batch_size):
        raise RuntimeInputError(
            f"program {phase.program!r} is made for batches of {rows}; batch_size must be that, is {phase.batch_size}"
        )
    weighted = any(isinstance(port, ExampleWeight) for port in program.inputs)
    whole = rows is not None and not weighted
    if whole and fields.count < phase.batch_size:
        raise RuntimeInputError(
            f"{fields.count} examples, but program {phase.program!r} is made for batches of {phase.batch_size}; "
            "give more, or convert with a free batch axis"
        )
    metric_ports = [port for port in program.outputs if isinstance(port, Metric)]
    loss = loss_of(metric_ports)
    loop = TrainLoop(sessions.get(phase.program), program, values, fields, phase.moves)
    for batch in batches(
        fields.count,
        phase.batch_size,
        epochs=phase.epochs,
        steps=phase.steps,
        shuffle=shuffle,
        seed=values.seed,
        phase=index,
        whole=whole,
    ):
        step = values.steps
        metrics = loop.step(batch.indices, rows or len(batch.indices))
        training.used[batch.indices] = True
        for port in metric_ports:
            training.metrics.add(port, metrics[port.name], len(batch.indices))
        if loss is not None:
            training.losses.append(metrics[loss.name])
        if on_step is not None and on_step(Progress(index, batch.epoch, step, metrics[loss.name] if loss else None)):
            training.stopped = True
            break
        if on_epoch is not None and batch.last_of_epoch:
            loop.store()
            on_epoch()
    loop.finish()
