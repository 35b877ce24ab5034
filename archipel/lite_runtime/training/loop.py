"""Training steps of one program over one schedule phase, without copying between steps.

The tensors that move live in two sets of buffers, each bound once as input and once as output (I/O binding): a step
reads one set and writes the other. The loop gathers batches into buffers that stay bound.

A step's loss is that of the weights that it reads, which the step before it wrote. So after a loss that is not finite,
the weights before that step are wanted, and this step has overwritten their buffers. The loop then repeats the steps
since a snapshot; they are deterministic.

Noise for privacy must not be drawn twice, and where it is added the loss, which has none, must decide nothing: one
example could make it NaN. For programs that read noise the loop looks at the tensors that a step has written instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from archipel.bundle import Program, release_pages
from archipel.bundle.roles import Count, ExampleWeight, Metric, Noise, Parameter, Personal, Port, State, Step
from archipel.errors import NonFiniteLossError
from archipel.lite_runtime.engines.program_session import ProgramSession
from archipel.lite_runtime.fields import BATCH_ROLES, Fields, Source
from archipel.lite_runtime.training.results import loss_of
from archipel.lite_runtime.values import Values, fixed_shape

_SNAPSHOT_AFTER = 1000
"""Groups of steps between snapshots: at most so many are repeated."""
MOVING = (Parameter, Personal, State)
"""Roles of what a step may change."""


class Repeated(NamedTuple):
    """A program that makes `program.steps` of the loop's steps in one graph, and its session."""

    session: ProgramSession
    program: Program


class TrainLoop:
    """Holds a phase's buffers. `moves` names the parameters and personal tensors that change; None: all."""

    def __init__(
        self,
        session: ProgramSession,
        program: Program,
        values: Values,
        fields: Fields,
        moves: Iterable[str] | None,
        repeated: Repeated | None = None,
    ) -> None:
        self._values = values
        self._fields = fields
        chosen = None if moves is None else set(moves)
        self._moving = [port for port in program.outputs if isinstance(port, MOVING) and port_moves(port, chosen)]
        self._loss = loss_of([port for port in program.outputs if isinstance(port, Metric)])
        self._start = self._read_start(program)
        self._sets = self._make_sets()
        self._bound: dict[int, Any] = {}  # of both engines: what a device holds is the same for both
        self._session = session
        self._current = 0
        noisy = any(isinstance(port, Noise) for port in program.inputs)
        self._history = None if noisy else _History(self._start, values.steps)
        self._single = _Engine(session, program, values, fields, self._moving, self._sets, self._bound)
        # A graph of several steps feeds all of its outputs back, so it cannot hold back tensors that shall stay.
        unchanged = len(self._moving) == sum(isinstance(port, MOVING) for port in program.outputs)
        if repeated and unchanged and repeated.session.holds == session.holds:
            self._repeated: _Engine | None = _Engine(*repeated, values, fields, self._moving, self._sets, self._bound)
        else:
            self._repeated = None

    @property
    def at_once(self) -> int:
        """The number of minibatches of one size for which one call of `step` is fastest; it also takes one."""
        return 1 if self._repeated is None else self._repeated.steps

    def step(self, batches: Sequence[np.ndarray], rows: int) -> list[dict[str, float]]:
        """Train on one or `at_once` minibatches, each the indices of its examples, padded to `rows` with weight 0.

        Returns the metrics of each. Raises NonFiniteLossError after going back to the last tensors with a finite loss,
        or with noise to the last finite ones.
        """
        if len(batches) == 1:
            return self._run(self._single, batches, rows)
        if self._repeated is None:
            return [self._run(self._single, [indices], rows)[0] for indices in batches]
        return self._run(self._repeated, batches, rows)

    def store(self) -> None:
        """Hand the present tensors to the values. Their buffers keep them for one more step."""
        tensors = self._tensors(self._current)
        for port in self._moving:
            self._values.write(port, tensors[port.name])

    def finish(self) -> None:
        """As `store`, for the end of a phase. Raises NonFiniteLossError if a tensor is not finite now."""
        # No later step will compute a loss of these tensors, so look at them directly.
        if (fault := self._infinite(self._tensors(self._current))) is not None:
            self._go_back(fault)
        self.store()

    def _run(self, engine: _Engine, batches: Sequence[np.ndarray], rows: int) -> list[dict[str, float]]:
        metrics = engine.run(batches, rows, self._current)
        if (fault := self._fault(metrics)) is not None:
            if len(batches) == 1 or self._history is None:
                self._go_back(fault)
            # The group has written the other set only. From the same tensors, single steps find the one that fails.
            return [self._run(self._single, [indices], rows)[0] for indices in batches]
        self._advance(batches, rows)
        return metrics

    def _advance(self, batches: Sequence[np.ndarray], rows: int) -> None:
        before = self._current
        self._current = 1 - self._current
        self._values.steps += len(batches)
        if self._history is not None:
            self._history.add(batches, rows, lambda: self._tensors(before), self._values.steps)

    def _fault(self, metrics: Sequence[dict[str, float]]) -> str | None:
        """What is not finite in a run that has just been made; None: nothing."""
        if self._history is None:
            return self._infinite(self._tensors(1 - self._current))
        if self._loss is not None:
            for each in metrics:
                if not math.isfinite(loss := each[self._loss.name]):
                    return f"the loss is {loss} at"
        return None

    def _tensors(self, index: int) -> dict[str, np.ndarray]:
        """A set of buffers with what the runs have made of it."""
        self._session.fetch(self._sets[index].values(), self._bound)
        return self._sets[index]

    def _infinite(self, tensors: dict[str, np.ndarray]) -> str | None:
        """Which of the moving tensors is not finite; None: all are."""
        for port in self._moving:
            array = tensors[port.name]
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                return f"{port.name!r} is not finite after"
        return None

    def _go_back(self, what: str) -> None:
        steps = self._values.steps
        # With noise the present tensors are finite: this step has not written into them.
        if self._history is not None:
            self._repeat(self._history)
        self.store()
        self._values.steps = steps
        kept = "finite weights" if self._history is None else "weights with a finite loss"
        raise NonFiniteLossError(
            f"training stopped: {what} step {steps}; the last {kept} are kept. "
            "Lower the learning rate or look for bad examples"
        )

    def _repeat(self, history: _History) -> None:
        """Repeat all steps since the snapshot but the last one, which wrote the tensors without a finite loss."""
        if not history.groups:  # before the first step the tensors that training started from stay
            return
        for name, array in history.snapshot.items():
            self._sets[self._current][name][...] = array
        self._session.send((self._sets[self._current][name] for name in history.snapshot), self._bound)
        # The step number is an input of the programs (and of their random numbers), so it is set back, too.
        self._values.steps = history.steps
        last, rows = history.groups[-1]
        # The last group step by step without its last step; the others in the same groups as before.
        for batches, size in (*history.groups[:-1], *(([indices], rows) for indices in last[:-1])):
            engine = self._single if self._repeated is None or len(batches) == 1 else self._repeated
            engine.run(batches, size, self._current)
            self._current = 1 - self._current
            self._values.steps += len(batches)

    def _read_start(self, program: Program) -> dict[str, np.ndarray]:
        """The first values of the moving tensors that the program reads, by output name."""
        inputs = {port_key(port): port for port in program.inputs if isinstance(port, MOVING)}
        return {port.name: self._values.read(port) for port in self._moving if port_key(port) in inputs}

    def _make_sets(self) -> list[dict[str, np.ndarray]]:
        sets = [{port.name: np.empty(fixed_shape(port), port.dtype) for port in self._moving} for _ in range(2)]
        for name, array in self._start.items():
            sets[0][name][...] = array
            release_pages(array)  # training reads the buffers, so the mapped file's pages need no memory
        return sets


class _History:
    """A snapshot of the moving tensors, and the steps since: groups of batches with their rows, in order."""

    def __init__(self, snapshot: dict[str, np.ndarray], steps: int) -> None:
        self.snapshot = snapshot
        self.steps = steps
        self.groups: list[tuple[Sequence[np.ndarray], int]] = []

    def add(
        self, batches: Sequence[np.ndarray], rows: int, before: Callable[[], dict[str, np.ndarray]], steps: int
    ) -> None:
        """Add a group that read the tensors `before()`; `steps` is the number of all steps, this group included."""
        # `before` is safe to keep: this group has computed its loss, and it was finite.
        if len(self.groups) == _SNAPSHOT_AFTER:
            tensors = before()
            self.snapshot = {name: tensors[name].copy() for name in self.snapshot}
            self.steps = steps - len(batches)
            self.groups.clear()
        self.groups.append((batches, rows))


class _Engine:
    """A train program with all inputs and outputs bound; `sets` hold the moving tensors, inputs and outputs in turn."""

    def __init__(
        self,
        session: ProgramSession,
        program: Program,
        values: Values,
        fields: Fields,
        moving: Sequence[Port],
        sets: list[dict[str, np.ndarray]],
        bound: dict[int, Any],
    ) -> None:
        self.steps = program.steps
        self._session = session
        self._program = program
        self._values = values
        self._fields = fields
        self._moving = moving
        self._sets = sets
        self._bound = bound
        metrics = [port for port in program.outputs if isinstance(port, Metric)]
        self._metrics = {port.name: np.zeros(fixed_shape(port), dtype=port.dtype) for port in metrics}
        self._inputs: dict[str, np.ndarray] = {}
        self._varying: list[tuple[Port, np.ndarray]] = []
        self._bind_inputs()
        self._batches: dict[int, _BatchBuffers] = {}

    def run(self, batches: Sequence[np.ndarray], rows: int, current: int) -> list[dict[str, float]]:
        """Read set `current`, write the one after it. Returns the metrics of each minibatch."""
        buffers = self._batches.get(rows)
        if buffers is None:
            buffers = self._batches[rows] = self._bind_batch(rows)
        buffers.fill(batches)
        # Into the buffers that are bound already, so that nothing is bound again.
        for port, buffer in self._varying:
            buffer[...] = self._values.read(port)
        buffers.runs[current]()
        if self.steps == 1:
            return [{name: float(buffer) for name, buffer in self._metrics.items()}]
        return [{name: float(buffer[k]) for name, buffer in self._metrics.items()} for k in range(self.steps)]

    def _bind_inputs(self) -> None:
        moving = {port_key(port) for port in self._moving}
        for port in self._program.inputs:
            if isinstance(port, BATCH_ROLES) or (isinstance(port, MOVING) and port_key(port) in moving):
                continue
            # These change with every step; everything else outside the batch is constant during a phase.
            if isinstance(port, Step | Noise) or (isinstance(port, Count) and port.of == "steps"):
                array = np.zeros(fixed_shape(port), dtype=port.dtype)
                self._varying.append((port, array))
            else:
                array = np.asarray(self._values.read(port), order="C")
            self._inputs[port.name] = array

    def _bind_batch(self, rows: int) -> _BatchBuffers:
        batch = _BatchBuffers(self._program, self._fields, rows)
        read = {port_key(port): port.name for port in self._program.inputs if isinstance(port, MOVING)}
        varying = {port.name for port, _ in self._varying}
        kept = {*(set(self._inputs) - varying), *read.values(), *(port.name for port in self._moving)}
        # One binding for each set to read from, so that a step only chooses among them.
        for index in range(len(self._sets)):
            inputs, outputs = {**self._inputs, **batch.values}, dict(self._metrics)
            for port in self._moving:
                if port_key(port) in read:
                    inputs[read[port_key(port)]] = self._sets[index][port.name]
                outputs[port.name] = self._sets[(index + 1) % len(self._sets)][port.name]
            batch.runs.append(self._session.bind(inputs, outputs, self._bound, kept))
        return batch


class _BatchBuffers:
    """Buffers for minibatches of `rows` examples, and a binding for each set of moving tensors."""

    def __init__(self, program: Program, fields: Fields, rows: int) -> None:
        self.values: dict[str, np.ndarray] = {}
        self.runs: list[Callable[[], None]] = []
        self._data: list[tuple[Source, np.ndarray]] = []
        self._weights: list[tuple[Source | None, np.ndarray]] = []
        several = program.steps > 1
        for port in program.inputs:
            if not isinstance(port, BATCH_ROLES):
                continue
            source = fields.sources.get(port.name)
            # A graph of several steps has an axis for them before the batch axis.
            rest = fixed_shape(port, first=1 + several) if source is None else source.shape[1:]
            buffer = np.ones((program.steps, rows, *rest), dtype=port.dtype)
            self.values[port.name] = buffer if several else buffer[0]
            if isinstance(port, ExampleWeight):
                self._weights.append((source, buffer))
            elif source is not None:
                self._data.append((source, buffer))

    def fill(self, batches: Sequence[np.ndarray]) -> None:
        """Gather the examples. Rows beyond a batch's indices repeat its first example, with weight 0."""
        for index, indices in enumerate(batches):
            used = len(indices)
            for source, buffer in self._data:
                rows = buffer[index]
                source.take(indices, rows[:used])
                # A real example: one of zeros may give NaN somewhere, which weight 0 does not cancel.
                if used < len(rows):
                    rows[used:] = rows[0]
            for weights, buffer in self._weights:
                rows = buffer[index]
                if weights is None:
                    rows[:used] = 1
                else:
                    weights.take(indices, rows[:used])
                rows[used:] = 0


def port_key(port: Port) -> tuple[type[Port], str]:
    """What makes two ports one tensor."""
    return type(port), getattr(port, "tensor", "")


def port_moves(port: Port, chosen: set[str] | None) -> bool:
    """Whether a phase that moves the `chosen` tensors (None: all) keeps what a step writes to this port of MOVING."""
    # State of lifetime "step" starts anew with each step; other state always moves, whatever `moves` names.
    if isinstance(port, State):
        return port.lifetime != "step"
    return chosen is None or getattr(port, "tensor", "") in chosen
