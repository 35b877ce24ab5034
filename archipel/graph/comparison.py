"""An import beside its source in ONNX Runtime: memory and time are bounded, for the source may be anything."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import onnxruntime

from archipel.errors import ModelImportError
from archipel.lite_runtime.sessions import error_types

TOLERANCE = 1e-4
"""Largest deviation that an import may have."""

HALF_TOLERANCE = 2e-2
"""The same where the source rounds to float16 on the way and the import does not."""

MAX_SECONDS = 60.0
MAX_BYTES = 2**32
"""What all sessions here together may take, weights included."""


class CannotRunError(Exception):
    """ONNX Runtime refuses a graph, or stops in it."""


class Reference:
    """A graph in ONNX Runtime as it is written, without optimization."""

    def __init__(self, data: bytes) -> None:
        _limit_memory()
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        # Folding runs nodes before there is anything that could stop them.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.use_env_allocators", "1")
        try:
            self._session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        except error_types() as error:
            raise CannotRunError(_first_line(error)) from None
        self._types = {port.name: port.type for port in self._session.get_inputs()}

    def run(self, feed: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Outputs in order. Floats are cast to what the graph takes; inputs that it does not have are left out."""
        known = {name: _cast(array, self._types[name]) for name, array in feed.items() if name in self._types}
        run = onnxruntime.RunOptions()
        run.log_severity_level = 4
        run.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        timer = threading.Timer(MAX_SECONDS, setattr, (run, "terminate", True))
        timer.daemon = True
        timer.start()
        try:
            found: list[np.ndarray] = self._session.run(None, known, run)
        except error_types() as error:
            raise CannotRunError(_first_line(error)) from None
        finally:
            timer.cancel()
        return found


def deviation(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray], narrow: bool = False) -> float:
    """Largest absolute difference over the largest absolute value, the worst output's. Infinite where one has an
    infinity or NaN and the other has not; with `narrow` only where ours has, for theirs computed in float16. Of
    integers and truth values: the share that differs. Raises ModelImportError for other shapes.
    """
    if len(ours) != len(theirs):
        raise ModelImportError(f"the import has {len(ours)} outputs, the source {len(theirs)}")
    worst = 0.0
    for index, (found, expected) in enumerate(zip(ours, theirs)):
        if found.shape != expected.shape:
            raise ModelImportError(
                f"output {index} of the import has shape {list(found.shape)}, of the source {list(expected.shape)}"
            )
        if expected.dtype.kind in "fcV":  # V: bfloat16 and its like
            worst = max(worst, _distance(found.astype(np.float64), expected.astype(np.float64), narrow))
        elif expected.size:
            worst = max(worst, float(np.mean(found != expected)))
    return worst


def _distance(found: np.ndarray, expected: np.ndarray, narrow: bool) -> float:
    finite = np.isfinite(expected)
    if not np.isfinite(found[finite]).all():
        return float("inf")
    if not narrow and not np.array_equal(found[~finite], expected[~finite], equal_nan=True):
        return float("inf")
    scale = max(float(np.max(np.abs(expected[finite]), initial=0.0)), 1e-30)
    return float(np.max(np.abs(found[finite] - expected[finite]), initial=0.0)) / scale


def _cast(array: np.ndarray, wanted: str) -> np.ndarray:
    dtype = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64}.get(wanted)
    return array if dtype is None else array.astype(dtype)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


@cache
def _limit_memory() -> None:
    # ONNX Runtime has one such allocator for the process; only sessions that ask for it use it.
    info = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    same_as_requested = 1
    arena = onnxruntime.OrtArenaCfg({"max_mem": MAX_BYTES, "arena_extend_strategy": same_as_requested})
    onnxruntime.create_and_register_allocator(info, arena)
