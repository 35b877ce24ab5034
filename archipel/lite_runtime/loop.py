"""Training steps of one program over one schedule phase, without copying between steps.

The tensors that move live in three sets of buffers, each bound once as input and once as output (I/O binding): step k
reads set k mod 3 and writes the next. Two would do for training; the third is what lets a diverging training return to
the last weights whose loss was finite, for a loss tells about the weights that the step before it wrote. Batches are
gathered into buffers that stay bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from archipel.bundle import Program
from archipel.bundle.roles import Count, ExampleWeight, Metric, Noise, Parameter, Personal, Port, State, Step
from archipel.errors import NonFiniteLossError
from archipel.lite_runtime.fields import BATCH_ROLES, Fields, Source
from archipel.lite_runtime.results import loss_of
from archipel.lite_runtime.sessions import Session, bound_value
from archipel.lite_runtime.values import Values, fixed_shape

_SETS = 3
_MOVING = (Parameter, Personal, State)


class Repeated(NamedTuple):
    """A program that makes `program.steps` of the loop's steps in one graph, and its session."""

    session: Session
    program: Program


class TrainLoop:
    """Holds a phase's buffers. `moves` names the parameters and personal tensors that take their new values."""

    def __init__(
        self,
        session: Session,
        program: Program,
        values: Values,
        fields: Fields,
        moves: Iterable[str] | None,
        repeated: Repeated | None = None,
    ) -> None:
        self._values = values
        self._fields = fields
        chosen = None if moves is None else set(moves)
        self._moving = [port for port in program.outputs if isinstance(port, _MOVING) and _moves(port, chosen)]
        self._loss = loss_of([port for port in program.outputs if isinstance(port, Metric)])
        self._sets = self._make_sets(program)
        self._current = 0
        self._last: tuple[Sequence[np.ndarray], int] = ((), 0)
        bound = [{name: bound_value(array) for name, array in tensors.items()} for tensors in self._sets]
        self._single = _Engine(session, program, values, fields, self._moving, bound)
        # Tensors that stay would move inside a repeated graph.
        unchanged = len(self._moving) == sum(isinstance(port, _MOVING) for port in program.outputs)
        self._repeated = _Engine(*repeated, values, fields, self._moving, bound) if repeated and unchanged else None

    @property
    def at_once(self) -> int:
        """How many minibatches of one size `step` takes best; it also takes one."""
        return 1 if self._repeated is None else self._repeated.steps

    def step(self, batches: Sequence[np.ndarray], rows: int) -> list[dict[str, float]]:
        """Train on one or `at_once` minibatches, each the indices of its examples padded to `rows` with weight 0.

        Returns the metrics of each. Raises NonFiniteLossError after going back to the last tensors whose loss was
        finite.
        """
        if len(batches) == 1 or self._repeated is None:
            return [self._step(indices, rows) for indices in batches]
        metrics = self._repeated.run(batches, rows, self._current)
        if not all(map(self._finite, metrics)):
            # One by one from the same tensors, to find the step that fails and keep what was good before it.
            return [self._step(indices, rows) for indices in batches]
        self._moved(batches, rows)
        return metrics

    def store(self) -> None:
        """Hand the present tensors to the values. They stay as they are for two more steps."""
        for port in self._moving:
            self._values.write(port, self._sets[self._current][port.name])

    def finish(self) -> None:
        """As `store`, for the end of a phase. Raises NonFiniteLossError if the last step left numbers not finite."""
        for port in self._moving:
            array = self._sets[self._current][port.name]
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                self._go_back(f"{port.name!r} is not finite after")
        self.store()

    def _step(self, indices: np.ndarray, rows: int) -> dict[str, float]:
        [metrics] = self._single.run([indices], rows, self._current)
        if not self._finite(metrics):
            self._go_back(f"the loss is {metrics[self._loss.name] if self._loss else math.nan} at")
        self._moved([indices], rows)
        return metrics

    def _moved(self, batches: Sequence[np.ndarray], rows: int) -> None:
        self._current = (self._current + 1) % _SETS
        self._values.steps += len(batches)
        self._last = batches, rows

    def _finite(self, metrics: dict[str, float]) -> bool:
        return self._loss is None or math.isfinite(metrics[self._loss.name])

    def _go_back(self, what: str) -> None:
        steps = self._values.steps
        batches, rows = self._last
        if batches:
            self._current = (self._current - 1) % _SETS
            self._values.steps -= len(batches)
        for indices in batches[:-1]:
            # One graph made several steps, and all but its last are good.
            self._single.run([indices], rows, self._current)
            self._moved([indices], rows)
        self.store()
        self._values.steps = steps
        raise NonFiniteLossError(
            f"training stopped: {what} step {steps}; the last weights with a finite loss are kept. "
            "Lower the learning rate or look for bad examples"
        )

    def _make_sets(self, program: Program) -> list[dict[str, np.ndarray]]:
        inputs = {_key(port): port for port in program.inputs if isinstance(port, _MOVING)}
        sets: list[dict[str, np.ndarray]] = [{} for _ in range(_SETS)]
        for port in self._moving:
            for each in sets:
                each[port.name] = np.empty(fixed_shape(port), dtype=port.dtype)
            if _key(port) in inputs:
                sets[0][port.name][...] = self._values.read(port)
        return sets


class _Engine:
    """A train program with everything bound: `sets` are the moving tensors, as inputs and outputs in turn."""

    def __init__(
        self,
        session: Session,
        program: Program,
        values: Values,
        fields: Fields,
        moving: Sequence[Port],
        sets: list[dict[str, Any]],
    ) -> None:
        self.steps = program.steps
        self._session = session
        self._program = program
        self._values = values
        self._fields = fields
        self._moving = moving
        self._sets = sets
        metrics = [port for port in program.outputs if isinstance(port, Metric)]
        self._metrics = {port.name: np.zeros(fixed_shape(port), dtype=port.dtype) for port in metrics}
        self._metric_values = {name: bound_value(buffer) for name, buffer in self._metrics.items()}
        self._inputs: dict[str, Any] = {}
        self._varying: list[tuple[Port, np.ndarray]] = []
        self._bind_inputs()
        self._batches: dict[int, _BatchBuffers] = {}

    def run(self, batches: Sequence[np.ndarray], rows: int, current: int) -> list[dict[str, float]]:
        """Read set `current`, write the one after it. Returns the metrics of each minibatch."""
        buffers = self._batches.get(rows)
        if buffers is None:
            buffers = self._batches[rows] = self._bind_batch(rows)
        buffers.fill(batches)
        for port, buffer in self._varying:
            buffer[...] = self._values.read(port)
        self._session.run_bound(buffers.bindings[current])
        if self.steps == 1:
            return [{name: float(buffer) for name, buffer in self._metrics.items()}]
        return [{name: float(buffer[k]) for name, buffer in self._metrics.items()} for k in range(self.steps)]

    def _bind_inputs(self) -> None:
        moving = {_key(port) for port in self._moving}
        for port in self._program.inputs:
            if isinstance(port, BATCH_ROLES) or (isinstance(port, _MOVING) and _key(port) in moving):
                continue
            if isinstance(port, Step | Noise) or (isinstance(port, Count) and port.of == "steps"):
                array = np.zeros(fixed_shape(port), dtype=port.dtype)
                self._varying.append((port, array))
            else:
                array = np.asarray(self._values.read(port), order="C")
            self._inputs[port.name] = bound_value(array)

    def _bind_batch(self, rows: int) -> _BatchBuffers:
        batch = _BatchBuffers(self._program, self._fields, rows)
        read = {_key(port): port.name for port in self._program.inputs if isinstance(port, _MOVING)}
        for index in range(_SETS):
            binding = self._session.native.io_binding()
            for name, value in (*self._inputs.items(), *batch.values.items()):
                binding.bind_ortvalue_input(name, value)
            for name, value in self._metric_values.items():
                binding.bind_ortvalue_output(name, value)
            for port in self._moving:
                if _key(port) in read:
                    binding.bind_ortvalue_input(read[_key(port)], self._sets[index][port.name])
                binding.bind_ortvalue_output(port.name, self._sets[(index + 1) % _SETS][port.name])
            batch.bindings.append(binding)
        return batch


class _BatchBuffers:
    """Buffers for minibatches of `rows` examples, and the three bindings that read them."""

    def __init__(self, program: Program, fields: Fields, rows: int) -> None:
        self.values: dict[str, Any] = {}
        self.bindings: list[Any] = []
        self._data: list[tuple[Source, np.ndarray]] = []
        self._weights: list[tuple[Source | None, np.ndarray]] = []
        several = program.steps > 1
        for port in program.inputs:
            if not isinstance(port, BATCH_ROLES):
                continue
            source = fields.sources.get(port.name)
            rest = fixed_shape(port, first=1 + several) if source is None else source.shape[1:]
            buffer = np.ones((program.steps, rows, *rest), dtype=port.dtype)
            self.values[port.name] = bound_value(buffer if several else buffer[0])
            if isinstance(port, ExampleWeight):
                self._weights.append((source, buffer))
            elif source is not None:
                self._data.append((source, buffer))

    def fill(self, batches: Sequence[np.ndarray]) -> None:
        """Gather the examples; rows beyond a batch's indices repeat its first one, with weight 0."""
        for index, indices in enumerate(batches):
            used = len(indices)
            for source, buffer in self._data:
                rows = buffer[index]
                source.take(indices, rows[:used])
                if used < len(rows):
                    rows[used:] = rows[0]
            for weights, buffer in self._weights:
                rows = buffer[index]
                if weights is None:
                    rows[:used] = 1
                else:
                    weights.take(indices, rows[:used])
                rows[used:] = 0


def _key(port: Port) -> tuple[type[Port], str]:
    return type(port), getattr(port, "tensor", "")


def _moves(port: Port, chosen: set[str] | None) -> bool:
    if isinstance(port, State):
        return port.lifetime != "step"
    return chosen is None or getattr(port, "tensor", "") in chosen
