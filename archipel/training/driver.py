"""The reference driver: runs a train program on ONNX Runtime, carrying parameters and state from step to step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime

from archipel.bundle.roles import (
    Example,
    ExampleWeight,
    Hyperparameter,
    Label,
    Metric,
    Parameter,
    Personal,
    Program,
    Seed,
    State,
    Step,
    role_of,
)
from archipel.errors import TrainingError
from archipel.graph.model import Model

Batch = Mapping[str, np.ndarray] | Sequence[np.ndarray]
"""Arrays by field name, or in the order of the program's examples, labels and weights."""


class StepRunner:
    """A train program in an ONNX Runtime session. `tensors` holds the current parameters and state, by tensor name."""

    def __init__(self, step: Model, hyperparameters: Mapping[str, float] | None = None, seed: int = 0) -> None:
        if step.signature is None or step.signature.kind != "train":
            raise TrainingError("run_steps: expected a train program, such as step_graph returns")
        self._signature: Program = step.signature
        self._seed = seed
        self._count = 0
        self._scalars = _scalars(self._signature, hyperparameters or {})
        self._fields = [p for p in self._signature.inputs if isinstance(p, Example | Label | ExampleWeight)]
        self.tensors = _initial(self._signature, step)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(step.to_bytes(), options, providers=["CPUExecutionProvider"])

    def step(self, batch: Batch) -> dict[str, float]:
        """Run one step and keep what it wrote. Returns the metrics."""
        feed = {**self._scalars, **self._batch(batch)}
        for port in self._signature.inputs:
            if isinstance(port, Parameter | Personal | State):
                feed[port.name] = self.tensors[port.tensor]
            elif isinstance(port, Step):
                feed[port.name] = np.asarray(self._count, port.dtype)
            elif isinstance(port, Seed):
                feed[port.name] = np.asarray(self._seed, port.dtype)
        results = self._session.run([port.name for port in self._signature.outputs], feed)
        metrics = {}
        for written, result in zip(self._signature.outputs, results):
            if isinstance(written, Parameter | Personal | State):
                self.tensors[written.tensor] = result
            elif isinstance(written, Metric):
                metrics[written.name] = float(result)
        self._count += 1
        return metrics

    def _batch(self, batch: Batch) -> dict[str, np.ndarray]:
        names = [port.name for port in self._fields]
        given = dict(batch) if isinstance(batch, Mapping) else dict(zip(names, batch))
        if set(given) != set(names) or (not isinstance(batch, Mapping) and len(batch) != len(names)):
            raise TrainingError(f"run_steps: a batch has the fields {names}, got {sorted(given)}")
        return {port.name: np.asarray(given[port.name], port.dtype) for port in self._fields}


def run_steps(
    step: Model, batches: Iterable[Batch], hyperparameters: Mapping[str, float] | None = None, seed: int = 0
) -> list[float]:
    """Train from the step's `initial` values, one step per batch. Returns the loss of each step, before its update.

    Raises TrainingError for an unknown or out-of-bounds hyperparameter and for a batch with the wrong fields.
    """
    runner = StepRunner(step, hyperparameters, seed)
    losses = []
    for batch in batches:
        metrics = runner.step(batch)
        if "loss" not in metrics:
            raise TrainingError(f"run_steps: the program has no metric 'loss'; it has {sorted(metrics)}")
        losses.append(metrics["loss"])
    return losses


def _scalars(signature: Program, given: Mapping[str, float]) -> dict[str, Any]:
    ports = {port.name: port for port in signature.inputs if isinstance(port, Hyperparameter)}
    for name, value in given.items():
        port = ports.get(name)
        if port is None:
            raise TrainingError(f"run_steps: no hyperparameter {name!r}; the program has {sorted(ports)}")
        if not port.minimum <= value <= port.maximum:
            raise TrainingError(
                f"run_steps: {name}={value} is outside [{port.minimum:g}, {port.maximum:g}], its declared bounds"
            )
    return {name: np.asarray(given.get(name, port.default), port.dtype) for name, port in ports.items()}


def _initial(signature: Program, step: Model) -> dict[str, np.ndarray]:
    tensors = {}
    for port in signature.inputs:
        if not isinstance(port, Parameter | Personal | State):
            continue
        if port.tensor in step.initial:
            tensors[port.tensor] = np.asarray(step.initial[port.tensor], port.dtype)
        elif isinstance(port, State) and not isinstance(port.init, str):
            tensors[port.tensor] = np.full([int(d) for d in port.shape], port.init, port.dtype)
        else:
            raise TrainingError(
                f"run_steps: no first value for {role_of(port)} {port.tensor!r}; put it in the model's `initial`"
            )
    return tensors
