"""What a process of peers/train_steps.py reads beside the step graph: its `Job`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from archipel.bundle.roles import Example, Hyperparameter, Label, Parameter, Personal, State
from archipel.graph import Model
from archipel.training import StepRunner


def write_values(step: Model, rate: float, batches: Iterable[Sequence[np.ndarray]], folder: Path, **told: Any) -> None:
    """Write initial.npz, feed0.npz, feed1.npz, ... and job.json.

    Arguments:
        step: the step graph.
        rate: what its input `lr` gets.
        batches: minibatches, each the examples and the labels.
        folder: where the files go.
        told: more settings for job.json.
    """
    assert step.signature is not None
    inputs, outputs = step.signature.inputs, step.signature.outputs
    kept = {port.tensor: port.name for port in inputs if isinstance(port, Parameter | Personal | State)}
    first = StepRunner(step).tensors
    initial = {port: first[tensor] for tensor, port in kept.items()}
    initial |= {
        p.name: np.asarray(rate if p.name == "lr" else p.default, p.dtype)
        for p in inputs
        if isinstance(p, Hyperparameter)
    }
    np.savez(folder / "initial.npz", **initial)
    fields = [port for port in inputs if isinstance(port, Example | Label)]
    for index, arrays in enumerate(batches):
        feed = {port.name: np.asarray(array, port.dtype) for port, array in zip(fields, arrays)}
        np.savez(folder / f"feed{index}.npz", **feed)
    carried = {p.name: kept[p.tensor] for p in outputs if isinstance(p, Parameter | Personal | State)}
    names = {"inputs": [p.name for p in inputs], "outputs": [p.name for p in outputs], "carried": carried}
    (folder / "job.json").write_text(json.dumps(names | told))
