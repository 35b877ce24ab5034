"""The program of a StepRunner on PyTorch: what it trains stays on the device from step to step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from archipel.engine_registry import Refusal
from archipel.errors import ArchipelError, NotANumberError, TrainingError
from archipel.graph.functions import inline_functions
from archipel.graph.model import Model
from archipel.training.cloud.programs.engine import TorchSession, find_device, to_numpy
from archipel.training.step_engines import StepEngine


class TorchSteps(StepEngine):
    """A program on the device that `find_device` finds. Raises TrainingError where it cannot run there."""

    def __init__(self, step: Model, device: str) -> None:
        graph = step.ir.clone()
        inline_functions(graph)
        try:
            self._session = TorchSession("step", Model(graph), 0, find_device(device))
        except (ArchipelError, Refusal) as error:
            raise TrainingError(f"run_steps: PyTorch cannot open the program: {error}") from None

    def run(self, outputs: Sequence[str], feed: Mapping[str, Any], kept: Collection[str]) -> list[Any]:
        try:
            results = self._session.run_held(outputs, feed)
        except NotANumberError:
            raise
        except ArchipelError as error:
            raise TrainingError(str(error)) from None
        return [each if name in kept else to_numpy(each) for name, each in zip(outputs, results)]

    def array(self, held: Any) -> np.ndarray:
        return to_numpy(held).copy() if isinstance(held, torch.Tensor) else np.asarray(held)
