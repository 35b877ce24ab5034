"""Training steps of one program over one schedule phase, without copying between steps.

The tensors that move live in three sets of buffers, each bound once as input and once as output (I/O binding): step k
reads set k mod 3 and writes the next. The third set is what lets a diverging training return to the last weights whose
loss was finite. Batches are gathered into buffers that stay bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from archipel.bundle import Program
from archipel.bundle.roles import Count, ExampleWeight, Metric, Noise, Parameter, Personal, Port, State, Step
from archipel.errors import NonFiniteLossError
from archipel.lite_runtime.fields import FIELD_ROLES, Fields
from archipel.lite_runtime.results import loss_of
from archipel.lite_runtime.sessions import Session, bound_value
from archipel.lite_runtime.values import Values, fixed_shape

_SETS = 3
_MOVING = (Parameter, Personal, State)


class TrainLoop:
    """Holds a phase's buffers. `moves` names the parameters and personal tensors that take their new values."""

    def __init__(
        self,
        session: Session,
        program: Program,
        values: Values,
        fields: Fields,
        moves: Iterable[str] | None,
    ) -> None:
        self._session = session
        self._program = program
        self._values = values
        self._fields = fields
        chosen = None if moves is None else set(moves)
        self._moving = [port for port in program.outputs if isinstance(port, _MOVING) and _moves(port, chosen)]
        self._metrics = [port for port in program.outputs if isinstance(port, Metric)]
        self._loss = loss_of(self._metrics)
        self._metric_buffers = {port.name: np.zeros((), dtype=port.dtype) for port in self._metrics}
        self._inputs: dict[str, Any] = {}
        self._varying: list[tuple[Port, np.ndarray]] = []
        self._sets = self._make_sets()
        self._set_values = [{name: bound_value(array) for name, array in sets.items()} for sets in self._sets]
        self._bind_inputs()
        self._metric_values = {name: bound_value(buffer) for name, buffer in self._metric_buffers.items()}
        self._batches: dict[int, _BatchBuffers] = {}
        self._current = 0
        self._made = 0

    def step(self, indices: np.ndarray, rows: int) -> dict[str, float]:
        """Train on the examples `indices`, padded to `rows` with weight 0, and return the metrics.

        Raises NonFiniteLossError after going back to the last tensors whose loss was finite.
        """
        values = self._values
        batch = self._batches.get(rows)
        if batch is None:
            batch = self._batches[rows] = self._bind_batch(rows)
        batch.fill(indices)
        for port, buffer in self._varying:
            buffer[...] = values.read(port)
        self._session.run_bound(batch.bindings[self._current])
        metrics = {name: float(buffer) for name, buffer in self._metric_buffers.items()}
        if self._loss is not None and not math.isfinite(metrics[self._loss.name]):
            self._go_back(f"the loss is {metrics[self._loss.name]} at")
        self._current = (self._current + 1) % _SETS
        self._made += 1
        values.steps += 1
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

    def _go_back(self, what: str) -> None:
        if self._made:
            self._current = (self._current - 1) % _SETS
        self.store()
        raise NonFiniteLossError(
            f"training stopped: {what} step {self._values.steps}; the last weights with a finite loss are kept. "
            "Lower the learning rate or look for bad examples"
        )

    def _make_sets(self) -> list[dict[str, np.ndarray]]:
        inputs = {_key(port): port for port in self._program.inputs if isinstance(port, _MOVING)}
        sets: list[dict[str, np.ndarray]] = [{} for _ in range(_SETS)]
        for port in self._moving:
            for each in sets:
                each[port.name] = np.empty(fixed_shape(port), dtype=port.dtype)
            if _key(port) in inputs:
                sets[0][port.name][...] = self._values.read(port)
        return sets

    def _bind_inputs(self) -> None:
        moving = {_key(port) for port in self._moving}
        for port in self._program.inputs:
            if isinstance(port, FIELD_ROLES) or (isinstance(port, _MOVING) and _key(port) in moving):
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
                    binding.bind_ortvalue_input(read[_key(port)], self._set_values[index][port.name])
                binding.bind_ortvalue_output(port.name, self._set_values[(index + 1) % _SETS][port.name])
            batch.bindings.append(binding)
        return batch


class _BatchBuffers:
    """Buffers for batches of `rows` examples, and the three bindings that read them."""

    def __init__(self, program: Program, fields: Fields, rows: int) -> None:
        self.values: dict[str, Any] = {}
        self.bindings: list[Any] = []
        self._data: list[tuple[np.ndarray, np.ndarray]] = []
        self._weights: list[tuple[np.ndarray | None, np.ndarray]] = []
        for port in program.inputs:
            if not isinstance(port, FIELD_ROLES):
                continue
            source = fields.arrays.get(port.name)
            rest = fixed_shape(port, first=1) if source is None else source.shape[1:]
            buffer = np.ones((rows, *rest), dtype=port.dtype)
            self.values[port.name] = bound_value(buffer)
            if isinstance(port, ExampleWeight):
                self._weights.append((source, buffer))
            elif source is not None:
                self._data.append((source, buffer))

    def fill(self, indices: np.ndarray) -> None:
        """Gather the examples; rows beyond `indices` repeat its first one, with weight 0."""
        used = len(indices)
        for source, buffer in self._data:
            # mode="clip" writes straight into the buffer; "raise" would go through another one.
            np.take(source, indices, axis=0, out=buffer[:used], mode="clip")
            if used < len(buffer):
                buffer[used:] = buffer[0]
        for weights, buffer in self._weights:
            buffer[:used] = 1 if weights is None else weights[indices]
            buffer[used:] = 0


def _key(port: Port) -> tuple[type[Port], str]:
    return type(port), getattr(port, "tensor", "")


def _moves(port: Port, chosen: set[str] | None) -> bool:
    if isinstance(port, State):
        return port.lifetime != "step"
    return chosen is None or getattr(port, "tensor", "") in chosen
