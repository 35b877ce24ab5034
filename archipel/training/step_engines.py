"""What runs the program of a StepRunner: ONNX Runtime, or PyTorch (`training.cloud.programs.engine`)."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime

from archipel.bundle.graphs.operators import KERNELS_DOMAIN
from archipel.engine_registry import ENGINES
from archipel.errors import TrainingError
from archipel.graph.model import Model
from archipel.library_errors import one_line
from archipel.lite_runtime.engines.kernels import kernel_pack
from archipel.lite_runtime.engines.onnx_runtime import error_types
from archipel.mode import get_mode

ONNX_RUNTIME = "onnxruntime"


class StepEngine(ABC):
    """An opened program."""

    @abstractmethod
    def run(self, outputs: Sequence[str], feed: Mapping[str, Any], kept: Collection[str]) -> list[Any]:
        """The outputs: those in `kept` as the engine takes them again in a later feed, the others as arrays.

        Nothing changes them. Raises TrainingError, whose text is what the engine says.
        """

    @abstractmethod
    def array(self, held: Any) -> np.ndarray:
        """The content of an array, or of what `run` has returned for an output in `kept`."""


def open_engine(step: Model, engine: str) -> StepEngine:
    """Open a program in "onnxruntime", in "torch" on its best device, or in "torch:cpu", "torch:cuda:1" and so on.

    Raises TrainingError where the engine cannot run it, or is none; MissingExtraError where it is not installed.
    """
    if get_mode() == "eager":
        engine = "torch:cpu"  # node by node, whatever was asked for
    if engine == ONNX_RUNTIME:
        return _OnnxRuntime(step)
    name, _, device = engine.partition(":")
    if name != "torch":
        raise TrainingError(f"engine {engine!r} is none that trains graphs in memory; choose from onnxruntime, torch")
    ENGINES["torch"].require()
    from archipel.training.cloud.programs.steps import TorchSteps

    return TorchSteps(step, device or "auto")


class _OnnxRuntime(StepEngine):
    def __init__(self, step: Model) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # the errors say the same
        options.enable_mem_pattern = options.enable_mem_reuse = False  # as on devices: less memory, at the same speed
        # Training through rounding needs it computed as the graph says: no fusing with integer kernels.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        pack = kernel_pack() if KERNELS_DOMAIN in step.ir.opset_imports else None
        if pack is not None and pack.library is not None:
            pack.register(options, os.cpu_count() or 1)  # ONNX Runtime uses all cores, too
        try:
            self._session = onnxruntime.InferenceSession(step.to_bytes(), options, providers=["CPUExecutionProvider"])
        except error_types() as error:
            raise TrainingError(f"run_steps: ONNX Runtime cannot open the program: {one_line(error)}") from None

    def run(self, outputs: Sequence[str], feed: Mapping[str, Any], kept: Collection[str]) -> list[Any]:
        try:
            return self._session.run(outputs, feed)  # type: ignore[no-any-return]
        except error_types() as error:
            raise TrainingError(one_line(error)) from None

    def array(self, held: Any) -> np.ndarray:
        return held  # type: ignore[no-any-return]
