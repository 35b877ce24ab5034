"""Runs an import and its source in ONNX Runtime, with bounds on memory and time: the source is not trusted."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import onnxruntime

from archipel.errors import ModelImportError
from archipel.library_errors import one_line
from archipel.lite_runtime.engines.onnx_runtime import error_types

TOLERANCE = 1e-4
"""Largest deviation (see `deviation`) that an import may have."""

HALF_TOLERANCE = 2e-2
"""The same where the source rounds to float16 on the way and the import does not."""

MAX_SECONDS = 60.0
MAX_BYTES = 2**32
"""Memory of all sessions of this file together, weights included, in bytes; MAX_SECONDS is for one run."""


class CannotRunError(Exception):
    """ONNX Runtime refuses a graph, or stops in it."""


class Reference:
    """A graph in ONNX Runtime, run as it is written, without optimization."""

    def __init__(self, data: bytes) -> None:
        _limit_memory()
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        # Constant folding would run nodes while the session opens, where no timer could stop them.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.use_env_allocators", "1")
        try:
            self._session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        except error_types() as error:
            raise CannotRunError(one_line(error)) from None
        self._types = {port.name: port.type for port in self._session.get_inputs()}

    def run(self, feed: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Run the graph. Returns the outputs in order.

        Floats in `feed` are cast to the types that the graph takes; entries that are no inputs of it are left out.
        Raises CannotRunError, also after MAX_SECONDS.
        """
        known = {name: _cast(array, self._types[name]) for name, array in feed.items() if name in self._types}
        run = onnxruntime.RunOptions()
        run.log_severity_level = 4
        run.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        # ONNX Runtime looks at `terminate` between nodes; a thread has to set it, as this one waits in `run`.
        timer = threading.Timer(MAX_SECONDS, setattr, (run, "terminate", True))
        timer.daemon = True
        timer.start()
        try:
            outputs: list[np.ndarray] = self._session.run(None, known, run)
        except error_types() as error:
            raise CannotRunError(one_line(error)) from None
        finally:
            timer.cancel()
        return outputs


def deviation(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray], narrow: bool = False) -> float:
    """How far two lists of outputs are apart: the worst output counts.

    Floats: the largest absolute difference over the largest absolute value; infinite where one has an infinity or NaN
    and the other has not. With `narrow` theirs may have some where ours has none: float16 overflows earlier. Integers
    and truth values: the share that differs. Raises ModelImportError for other shapes or another number of outputs.
    """
    if len(ours) != len(theirs):
        raise ModelImportError(f"the import has {len(ours)} outputs, the source {len(theirs)}")
    worst = 0.0
    for index, (computed, expected) in enumerate(zip(ours, theirs)):
        if computed.shape != expected.shape:
            raise ModelImportError(
                f"output {index} of the import has shape {list(computed.shape)}, of the source {list(expected.shape)}"
            )
        if expected.dtype.kind in "fcV":  # V: bfloat16 and its like
            worst = max(worst, _distance(computed.astype(np.float64), expected.astype(np.float64), narrow))
        elif expected.size:
            worst = max(worst, float(np.mean(computed != expected)))
    return worst


def _distance(computed: np.ndarray, expected: np.ndarray, narrow: bool) -> float:
    finite = np.isfinite(expected)
    if not np.isfinite(computed[finite]).all():
        return float("inf")
    if not narrow and not np.array_equal(computed[~finite], expected[~finite], equal_nan=True):
        return float("inf")
    # Outputs that are all zeros have no scale: any difference then is a large one.
    scale = max(float(np.max(np.abs(expected[finite]), initial=0.0)), 1e-30)
    return float(np.max(np.abs(computed[finite] - expected[finite]), initial=0.0)) / scale


def _cast(array: np.ndarray, wanted: str) -> np.ndarray:
    dtype = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64}.get(wanted)
    return array if dtype is None else array.astype(dtype)


@cache
def _limit_memory() -> None:
    # One allocator with a limit for the whole process; only sessions that ask for it, such as those here, use it.
    info = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    same_as_requested = 1
    arena = onnxruntime.OrtArenaCfg({"max_mem": MAX_BYTES, "arena_extend_strategy": same_as_requested})
    onnxruntime.create_and_register_allocator(info, arena)
