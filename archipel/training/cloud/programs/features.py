"""The outputs of a frozen backbone for the examples of many clients, computed once and kept on the device."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from archipel.bundle import Bundle
from archipel.bundle.roles import Example, Feature
from archipel.engine_registry import Refusal
from archipel.errors import RuntimeProgramError, TrainingError
from archipel.lite_runtime.fields import fixed_rows
from archipel.training.cloud.programs.engine import TorchSession, open_program

_ROWS = 256
"""Examples that run at once, unless the program fixes how many."""


class FeatureProgram:
    """A bundle's `features` program: as it reads examples alone, it needs no lanes.

    Raises TrainingError where PyTorch cannot run it.
    """

    def __init__(self, bundle: Bundle, name: str, device: torch.device, threads: int) -> None:
        self.program = bundle.program(name)
        try:
            self._session: TorchSession = open_program(
                name, bundle.program_path(name), threads, {"device": str(device)}
            )
        except Refusal as refusal:
            raise TrainingError(f"cohort: program {name!r} cannot run: {refusal}") from None
        self._device = device
        self._names = [port.name for port in self.program.outputs if isinstance(port, Feature)]
        self._fixed = fixed_rows(port for port in self.program.inputs if isinstance(port, Example))

    def run(self, arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Every feature by its name, [examples, ...] on the device.

        Arguments:
            arrays: the fields that the program reads, by name, each [examples, ...], at least one example.

        Raises RuntimeProgramError for features of another size than the manifest says, IndexRangeError.
        """
        count, size = len(next(iter(arrays.values()))), self._fixed or _ROWS
        parts = []
        for first in range(0, count, size):
            rows = {name: array[first : first + size] for name, array in arrays.items()}
            missing = size - len(next(iter(rows.values()))) if self._fixed else 0
            if missing:
                # Padded with the first example; what it gives is dropped below.
                rows = {name: np.concatenate([a, np.repeat(a[:1], missing, axis=0)]) for name, a in rows.items()}
            parts.append(self._session.run_held(self._names, rows))
        found = {name: torch.cat(part)[:count] for name, part in zip(self._names, zip(*parts))}
        for port in self.program.outputs:
            result = found.get(port.name)
            if result is not None and (tuple(result.shape[1:]) != tuple(port.shape[1:]) or len(result) != count):
                raise RuntimeProgramError(
                    f"features {port.name!r}: the manifest says {[count, *port.shape[1:]]}, the graph made "
                    f"{list(result.shape)}; convert the bundle again"
                )
        return found
