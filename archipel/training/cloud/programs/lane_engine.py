"""The tensors of many clients on one device, for who keeps the books of their rounds: a `simulation` engine."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from archipel.bundle import Bundle
from archipel.engine_registry import Refusal
from archipel.errors import TrainingError
from archipel.training.cloud.ops.types import to_torch
from archipel.training.cloud.programs.engine import find_device, to_numpy
from archipel.training.cloud.programs.lanes import LaneProgram

Rows = list[np.ndarray]

_MOST_AT_ONCE = 2**25
"""Elements in float64, 256 MiB."""


class TorchLanes:
    """PyTorch for programs with lanes, and their tensors on its device from run to run.

    Arguments:
        device: "auto", "cpu", "cuda", "cuda:1" or "mps".
        threads: inside one operator, on the CPU.

    Raises TrainingError for a device that is not there.
    """

    def __init__(self, device: str, threads: int) -> None:
        try:
            self.device = find_device(device)
        except Refusal as refusal:
            raise TrainingError(f"engine torch: {refusal}") from None
        self._threads = threads

    def open(self, bundle: Bundle, name: str) -> LaneProgram:
        """Raises TrainingError where PyTorch cannot run the program for many clients at once."""
        # Lanes that had smaller data have made fewer steps.
        return LaneProgram(bundle, name, self.device, self._threads, own_steps=True)

    def place(self, arrays: Mapping[str, np.ndarray], rows: Rows) -> tuple[dict[str, torch.Tensor], Rows]:
        """The clients' own rows of the arrays, on the device, and each client's rows in these."""
        chosen = np.concatenate(rows)
        ends = np.cumsum([len(each) for each in rows])
        placed = {name: to_torch(array[chosen]).to(self.device) for name, array in arrays.items()}
        return placed, [np.arange(end - len(each), end) for each, end in zip(rows, ends)]

    def take(self, held: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        return held[self._index(rows)]

    def hold(self, array: np.ndarray) -> torch.Tensor:
        return to_torch(array).to(self.device)

    def repeat(self, array: np.ndarray, lanes: int) -> torch.Tensor:
        return self.hold(array).expand(lanes, *array.shape).contiguous()

    def put(self, held: torch.Tensor, lanes: np.ndarray, values: torch.Tensor) -> torch.Tensor:
        # A new tensor: one of inference mode must not be written outside of it.
        return held.index_copy(0, self._index(lanes), values)

    def fetch(self, held: torch.Tensor) -> np.ndarray:
        return to_numpy(held)

    def find_finite(self, held: torch.Tensor) -> np.ndarray:
        return to_numpy(torch.isfinite(held).reshape(len(held), -1).all(dim=1))

    def sum_steps(
        self, held: torch.Tensor | np.ndarray, lanes: np.ndarray, limit: np.ndarray | None, step: float, largest: int
    ) -> np.ndarray:
        tensor = held if isinstance(held, torch.Tensor) else to_torch(held).to(self.device)
        if self.device.type == "mps":  # which has no float64
            tensor = tensor.cpu()
        flat = tensor.reshape(len(tensor), -1)
        total = np.empty(flat.shape[1], np.int64)
        width = max(1, _MOST_AT_ONCE // len(lanes))
        for start in range(0, flat.shape[1], width):
            rows = flat[:, start : start + width][torch.from_numpy(lanes).to(flat.device)].double()
            if limit is not None:
                most = torch.from_numpy(limit).to(flat.device)[:, None]
                rows = torch.clamp(rows, -most, most)
            # Whole numbers below 2^53 add up exactly.
            rows = rows.div_(step).round_().clamp_(-largest, largest)
            total[start : start + width] = to_numpy(rows.sum(dim=0).long())
        return total

    def _index(self, rows: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(rows).to(self.device)
