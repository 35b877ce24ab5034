"""Runs an `analyze` program over all local examples; its result is sums over batches."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from archipel.bundle import Program
from archipel.bundle.roles import Noise, Update
from archipel.errors import RuntimeInputError
from archipel.lite_runtime.engines.program_session import ProgramSession
from archipel.lite_runtime.fields import FIELD_ROLES, collect
from archipel.lite_runtime.values import Values


def analyze(
    session: ProgramSession,
    program: Program,
    values: Values,
    x: np.ndarray | Mapping[str, np.ndarray],
    batch_size: int,
) -> tuple[dict[str, np.ndarray], int]:
    """The sums by the name of the update output, and the number of examples. Raises RuntimeInputError."""
    if batch_size < 1:
        raise RuntimeInputError(f"analyze: batch_size must be at least 1, got {batch_size}")
    ports = [port for port in program.inputs if isinstance(port, FIELD_ROLES)]
    fields = collect("analyze", ports, x)
    constant = {port.name: np.asarray(values.read(port), order="C") for port in program.inputs if port not in ports}
    # The noise is for the whole device: in several batches it would be added several times.
    if any(isinstance(port, Noise) for port in program.inputs):
        batch_size = max(fields.count, 1)
    updates = [port for port in program.outputs if isinstance(port, Update)]
    names = [port.name for port in updates]
    # Summed in float64, so that many batches lose little to rounding.
    totals = {port.name: np.zeros(tuple(map(int, port.shape)), np.float64) for port in updates}
    for first in range(0, fields.count, batch_size):
        part = {name: np.asarray(array[first : first + batch_size], order="C") for name, array in fields.arrays.items()}
        for name, array in zip(names, session.run(names, {**constant, **part})):
            totals[name] += array
    return {port.name: totals[port.name].astype(port.dtype) for port in updates}, fields.count
