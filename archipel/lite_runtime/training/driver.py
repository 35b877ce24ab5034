"""Runs a bundle's programs by the roles of their ports: `begin`, the phases of a schedule, `finish`.

This code knows no federated algorithm. An algorithm's device half is its programs and the roles of their inputs and
outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from archipel.bundle import Bundle, Phase, Program
from archipel.bundle.roles import ExampleWeight, Metric, Parameter, Personal, Port, State, Update
from archipel.errors import NonFiniteLossError, RuntimeInputError, RuntimeProgramError
from archipel.lite_runtime.engines.sessions import Sessions
from archipel.lite_runtime.fields import BATCH_ROLES, FIELD_ROLES, Fields, collect, fixed_rows
from archipel.lite_runtime.out_of_range import locating
from archipel.lite_runtime.shuffle import batches, group_batches
from archipel.lite_runtime.training.features import DEFAULT_BUDGET, FeatureCache, find_features
from archipel.lite_runtime.training.loop import Repeated, TrainLoop
from archipel.lite_runtime.training.results import LocalUpdate, MetricTable, Progress, loss_of
from archipel.lite_runtime.values import Values

_KEPT = (Parameter, Personal, State)


@dataclass(frozen=True)
class Watch:
    """Functions that follow training.

    `on_step` is called after every step; training ends if it returns True. `on_epoch` is called after every pass over
    the data, when the values are up to date. `between` is called last, after each run of a graph, which may make
    several steps; it gets a function that brings the values up to date, and training ends if it returns False.
    """

    on_step: Callable[[Progress], object] | None = None
    on_epoch: Callable[[], None] | None = None
    between: Callable[[Callable[[], None]], bool] | None = None


class Training:
    """The progress of a run of phases: losses and metrics per step, which examples were used, whether it was stopped.

    Phases before `phase`, and `batches` batches of it, are done.
    """

    def __init__(self, count: int) -> None:
        self.losses: list[float] = []
        self.metrics = MetricTable()
        # A mask, so that an example that several batches use counts once.
        self.used = np.zeros(count, dtype=bool)
        self.stopped = False
        self.phase = 0
        self.batches = 0

    @property
    def examples(self) -> int:
        return int(np.count_nonzero(self.used))


def find_program(bundle: Bundle, kind: str) -> str | None:
    """The name of the program of this kind: the one named like the kind, else the only one; None if there is none.

    Raises RuntimeProgramError if there are several and none is named like the kind.
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
    """As `find_program`, but raises RuntimeProgramError, which names the `purpose`, if there is none."""
    name = find_program(bundle, kind)
    if name is None:
        raise RuntimeProgramError(
            f"bundle {bundle.manifest.name!r} has no {kind} program, so it cannot {purpose}; convert it with one"
        )
    return name


def find_repeated(bundle: Bundle, name: str) -> str | None:
    """The name of the program that makes the most steps of program `name` in one graph, None if there is none."""
    repeating = [(p.steps, other) for other, p in bundle.manifest.programs.items() if p.repeats == name]
    return max(repeating)[1] if repeating else None


def data_ports(bundle: Bundle, schedule: Sequence[Phase]) -> list[Port]:
    """The fields that the schedule's programs and the features program read, each once; labels come last."""
    programs = {phase.program: bundle.program(phase.program) for phase in schedule}
    features = find_features(bundle, programs)
    if features is not None:
        # First, as the model's inputs come before the labels, which no frozen backbone reads.
        programs = {features: bundle.program(features), **programs}
    ports: dict[str, Port] = {}
    for program in programs.values():
        for port in program.inputs:
            # Ports of one name in several programs are one field of the data.
            if isinstance(port, FIELD_ROLES):
                ports.setdefault(port.name, port)
    return list(ports.values())


def collect_data(
    bundle: Bundle,
    schedule: Sequence[Phase],
    x: np.ndarray | Mapping[str, np.ndarray],
    y: np.ndarray | None,
) -> Fields:
    """Check the local data for all phases, before the first one runs. Raises RuntimeInputError."""
    return collect("local data", data_ports(bundle, schedule), x, y)


def run_once(sessions: Sessions, bundle: Bundle, name: str, values: Values) -> dict[str, np.ndarray]:
    """Run a program that reads no data (begin, finish, refresh). Returns its outputs by name.

    New parameters, personal tensors and state also go to `values`.
    """
    program = bundle.program(name)
    feed = {port.name: np.asarray(values.read(port), order="C") for port in program.inputs}
    names = [port.name for port in program.outputs]
    outputs = dict(zip(names, sessions.get(name).run(names, feed)))
    # After the run: a program that fails changes nothing.
    for port in program.outputs:
        if isinstance(port, _KEPT):
            values.write(port, outputs[port.name])
    return outputs


def run_begin(sessions: Sessions, bundle: Bundle, values: Values) -> None:
    """Run `begin` if there is one."""
    name = find_program(bundle, "begin")
    if name is not None:
        run_once(sessions, bundle, name, values)


def run_phases(
    sessions: Sessions,
    bundle: Bundle,
    schedule: Sequence[Phase],
    values: Values,
    fields: Fields,
    *,
    shuffle: bool = True,
    watch: Watch | None = None,
    training: Training | None = None,
    keep_features: bool = True,
    feature_budget: int = DEFAULT_BUDGET,
) -> Training:
    """Train through the phases in order. `values` has the result, also after a loss that is not finite.

    `training` is an earlier run to continue. With `keep_features`, features of a frozen backbone are computed once per
    example and kept, those beyond `feature_budget` bytes on disk; otherwise they are computed for every batch.
    """
    training = training or Training(fields.count)
    watch = watch or Watch()
    name = find_features(bundle, {phase.program: bundle.program(phase.program) for phase in schedule})
    cache = None
    if name is not None:
        cache = FeatureCache(sessions, bundle, name, fields, keep=keep_features, budget=feature_budget)
    try:
        while training.phase < len(schedule) and not training.stopped:
            _run_phase(sessions, bundle, schedule[training.phase], values, fields, training, shuffle, watch)
            # A stopped phase stays the present one: a checkpoint of it continues after its last batch.
            if not training.stopped:
                training.phase, training.batches = training.phase + 1, 0
    finally:
        if cache is not None:
            cache.close()
    # `finish` may weight the update by the examples that were used, each counted once.
    values.examples = training.examples
    return training


def finish(sessions: Sessions, bundle: Bundle, values: Values) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Run `finish`. Returns the update by output name, and the metrics of `finish` by name."""
    name = need_program(bundle, "finish", "take part in a round")
    outputs = run_once(sessions, bundle, name, values)
    ports = bundle.program(name).outputs
    update = {port.name: outputs[port.name] for port in ports if isinstance(port, Update)}
    # One value that is not finite would spoil the sum of the whole cohort.
    for output, array in update.items():
        if not np.isfinite(array).all():
            raise NonFiniteLossError(f"program {name!r}: update {output!r} has values that are not finite")
    return update, {port.name: float(outputs[port.name]) for port in ports if isinstance(port, Metric)}


def run_round(
    sessions: Sessions,
    bundle: Bundle,
    values: Values,
    fields: Fields,
    *,
    watch: Watch | None = None,
    feature_budget: int = DEFAULT_BUDGET,
) -> LocalUpdate:
    """One device's part of a federated round: `begin`, the bundle's schedule, `finish`.

    `values` have the result, and what outlives the round; the caller keeps it (`Values.keep`). Raises RuntimeInputError
    where a callback asked to stop, NonFiniteLossError, RuntimeProgramError, IndexRangeError.
    """
    run_begin(sessions, bundle, values)
    with locating(bundle, fields.arrays):
        training = run_phases(
            sessions, bundle, bundle.manifest.schedule, values, fields, watch=watch, feature_budget=feature_budget
        )
    if training.stopped:
        raise RuntimeInputError(
            "local_round: a callback asked to stop, but a round cannot end early; raise an error to abandon it"
        )
    update, metrics = finish(sessions, bundle, values)
    return LocalUpdate(
        arrays=update,
        examples=training.examples,
        steps=values.steps,
        metrics={**training.metrics.reduce(), **metrics},
        losses=training.losses,
        parameters=values.parameters,
    )


def _run_phase(
    sessions: Sessions,
    bundle: Bundle,
    phase: Phase,
    values: Values,
    fields: Fields,
    training: Training,
    shuffle: bool,
    watch: Watch,
) -> None:
    program = bundle.program(phase.program)
    rows, whole = batch_shape(phase, program, fields)
    metric_ports = [port for port in program.outputs if isinstance(port, Metric)]
    loss = loss_of(metric_ports)
    session = sessions.get(phase.program)
    # An engine that holds the tensors on its device gains nothing from a graph of several steps.
    repeated = None if session.holds else find_repeated(bundle, phase.program)
    several = None if repeated is None else Repeated(sessions.get(repeated), bundle.program(repeated))
    loop = TrainLoop(session, program, values, fields, phase.moves, several)
    source = batches(
        fields.count,
        phase.batch_size,
        epochs=phase.epochs,
        steps=phase.steps,
        shuffle=shuffle,
        seed=values.seed,
        phase=training.phase,
        whole=whole,
        skip=training.batches,
    )
    # A group has batches of one size, for a graph of several steps, or one batch.
    for group in group_batches(source, loop.at_once, phase.batch_size):
        # The number of the group's first step: the next line advances it.
        step = values.steps
        metrics = loop.step([batch.indices for batch in group], rows or len(group[0].indices))
        answers = []
        for index, (batch, of_batch) in enumerate(zip(group, metrics)):
            training.used[batch.indices] = True
            for port in metric_ports:
                training.metrics.add(port, of_batch[port.name], len(batch.indices))
            if loss is not None:
                training.losses.append(of_batch[loss.name])
            if watch.on_step is not None:
                now = Progress(training.phase, batch.epoch, step + index, of_batch[loss.name] if loss else None)
                answers.append(watch.on_step(now))
        # Counted before `between`, which may write a checkpoint: these batches must not be trained on again.
        training.batches += len(group)
        if watch.on_epoch is not None and group[-1].last_of_epoch:
            # Validation reads the values, and the newest tensors are in the loop's buffers.
            loop.store()
            watch.on_epoch()
        if True in answers or (watch.between is not None and not watch.between(loop.store)):
            training.stopped = True
            break
    loop.finish()


def batch_shape(phase: Phase, program: Program, fields: Fields) -> tuple[int | None, bool]:
    """The fixed number of rows of the graph, None if it takes any, and whether every batch must have that many."""
    rows = fixed_rows(port for port in program.inputs if isinstance(port, BATCH_ROLES))
    if rows not in (None, phase.batch_size):
        raise RuntimeInputError(
            f"program {phase.program!r} is made for batches of {rows}; batch_size must be that, is {phase.batch_size}"
        )
    weighted = any(isinstance(port, ExampleWeight) for port in program.inputs)
    # Padding has weight 0; without weights it would count, so a smaller last batch is left out.
    whole = rows is not None and not weighted
    if whole and fields.count < phase.batch_size:
        raise RuntimeInputError(
            f"{fields.count} examples, but program {phase.program!r} is made for batches of {phase.batch_size}; "
            "give more, or convert with a free batch axis"
        )
    return rows, whole
