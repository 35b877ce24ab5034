"""Programs of a bundle for many devices at once: each has a lane, an index of a leading axis.

What runs them, and holds their tensors between runs, is a LaneEngine: ONNX Runtime here, PyTorch in `training.cloud`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from archipel.autodiff import vmap
from archipel.bundle import Bundle, Program
from archipel.bundle.roles import Count, Noise, Seed, Step
from archipel.engine_registry import ENGINES
from archipel.errors import ArchipelError, SimulationError, TrainingError
from archipel.graph.importing.bundled import read_bundled
from archipel.graph.importing.loading import normalize
from archipel.graph.model import Model
from archipel.lite_runtime.engines.delegates import Delegates, split_device
from archipel.lite_runtime.engines.onnx_runtime import Session, error_types, onnxruntime, open_exact
from archipel.lite_runtime.fields import BATCH_ROLES
from archipel.lite_runtime.training.loop import MOVING
from archipel.simulation.sums import LaneArrays

OF_A_DEVICE = (*BATCH_ROLES, *MOVING, Seed, Noise, Count, Step)

Arrays = Mapping[str, NDArray[Any]]
Rows = list[NDArray[np.int64]]


class RunsLanes(Protocol):
    """A program whose inputs of a device, and all outputs, have a leading axis of lanes."""

    def run(self, feed: Mapping[str, Any], lanes: int) -> dict[str, Any]:
        """The outputs by name, each `[lanes, ...]`, where the engine holds them; `feed` has arrays, or such tensors.

        Raises RuntimeProgramError, IndexRangeError.
        """


class LaneEngine(LaneArrays, Protocol):
    """Opens programs for many devices, and holds their tensors from run to run where it computes."""

    def open(self, bundle: Bundle, name: str) -> RunsLanes:
        """Raises SimulationError or TrainingError where the program has no such form."""

    def place(self, arrays: Arrays, rows: Rows) -> tuple[Mapping[str, Any], Rows]:
        """The devices' examples where the engine takes batches of them, and each device's rows in them."""

    def take(self, held: Any, rows: NDArray[np.int64]) -> Any:
        """Rows of a placed array, or lanes of what is held: `[*rows.shape, ...]`."""

    def hold(self, array: NDArray[Any]) -> Any:
        """An array that many runs read."""

    def repeat(self, array: NDArray[Any], lanes: int) -> Any:
        """The array in every lane, `[lanes, ...]`."""

    def put(self, held: Any, lanes: NDArray[np.int64], values: Any) -> Any:
        """What is held, with these values in these lanes; `held` may be changed."""

    def find_finite(self, held: Any) -> NDArray[np.bool_]:
        """Of each lane, whether all its elements are finite: `[lanes]`."""


def open_lane_engine(delegates: Delegates, threads: int) -> LaneEngine:
    """ONNX Runtime for "cpu", PyTorch for "torch" and "torch:cuda:1".

    Raises SimulationError for others and for a device that is not there, MissingExtraError.
    """
    if delegates == "cpu":
        return OnnxRuntimeLanes(threads)
    name, device = split_device(delegates) if isinstance(delegates, str) else ("", "")
    if name != "torch":
        raise SimulationError(f"{delegates!r} does not run many devices at once; ONNX Runtime and PyTorch do")
    ENGINES["torch"].require()
    from archipel.training.cloud.programs.lane_engine import TorchLanes

    try:
        return TorchLanes(device or "auto", threads)
    except TrainingError as error:
        raise SimulationError(str(error)) from None


class OnnxRuntimeLanes:
    """ONNX Runtime on the CPU, with arrays in memory. `threads`: inside one operator."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def open(self, bundle: Bundle, name: str) -> LaneProgram:
        return LaneProgram(bundle, name, self._threads)

    def place(self, arrays: Arrays, rows: Rows) -> tuple[Arrays, Rows]:
        return arrays, rows

    def take(self, held: NDArray[Any], rows: NDArray[np.int64]) -> NDArray[Any]:
        return np.take(held, rows, axis=0, mode="clip")

    def hold(self, array: NDArray[Any]) -> NDArray[Any]:
        return np.asarray(array, order="C")

    def repeat(self, array: NDArray[Any], lanes: int) -> NDArray[Any]:
        return np.repeat(array[None], lanes, axis=0)

    def put(self, held: NDArray[Any], lanes: NDArray[np.int64], values: NDArray[Any]) -> NDArray[Any]:
        if not held.flags.writeable:
            held = held.copy()
        held[lanes] = values
        return held

    def fetch(self, held: NDArray[Any]) -> NDArray[Any]:
        return held

    def find_finite(self, held: NDArray[Any]) -> NDArray[np.bool_]:
        return np.asarray(np.isfinite(held.reshape(len(held), -1)).all(axis=1))

    def sum_steps(
        self,
        held: NDArray[Any],
        lanes: NDArray[np.int64],
        limit: NDArray[np.float64] | None,
        step: float,
        largest: int,
    ) -> NDArray[np.int64]:
        rows = held.reshape(len(held), -1)[lanes].astype(np.float64)
        if limit is not None:
            np.clip(rows, -limit[:, None], limit[:, None], out=rows)
        rows /= step
        np.rint(rows, out=rows)
        np.clip(rows, -largest, largest, out=rows)
        # Whole numbers below 2^53 add up exactly.
        return np.asarray(rows.sum(axis=0).astype(np.int64))


class LaneProgram:
    """A program in ONNX Runtime, with its lanes from `autodiff.vmap`.

    Raises SimulationError where the program has no such form.
    """

    def __init__(self, bundle: Bundle, name: str, threads: int) -> None:
        self.program: Program = bundle.program(name)
        path = bundle.program_path(name)
        over = [port.name for port in self.program.inputs if isinstance(port, OF_A_DEVICE)]
        try:
            single = Model(normalize(read_bundled(path.parent, path.name), parameters=()))
            model = vmap(single, over, optimized=False)  # ONNX Runtime does it
        except ArchipelError as error:
            raise SimulationError(f"program {name!r} cannot run for many devices at once: {error}") from None
        ranks = {info.name: len(info.shape) for info in single.outputs}
        self._same = {info.name for info in model.outputs if len(info.shape) == ranks[info.name]}
        self.names = [port.name for port in self.program.outputs]
        ort = onnxruntime()
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 4
        options.enable_mem_pattern = False
        native = open_exact(model.to_bytes(), options)
        self._session = Session(name, native, error_types())

    def run(self, feed: Arrays, lanes: int) -> dict[str, NDArray[Any]]:
        """The outputs by name, each `[lanes, ...]`. Raises RuntimeProgramError, IndexRangeError."""
        results = dict(zip(self.names, self._session.run(self.names, feed)))
        # What follows from the shared inputs alone is the same in all lanes.
        return {
            name: np.broadcast_to(result, (lanes, *result.shape)) if name in self._same else result
            for name, result in results.items()
        }
