"""A program of a bundle for many devices at once in ONNX Runtime: each has a lane, an index of a leading axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipel.autodiff import vmap
from archipel.bundle import Bundle
from archipel.bundle.roles import Count, Seed, Step
from archipel.errors import ArchipelError, SimulationError
from archipel.graph.importing.bundled import read_bundled
from archipel.graph.importing.loading import normalize
from archipel.graph.model import Model
from archipel.lite_runtime.engines.onnx_runtime import Session, error_types, onnxruntime
from archipel.lite_runtime.fields import FIELD_ROLES
from archipel.lite_runtime.training.loop import MOVING

OF_A_DEVICE = (*FIELD_ROLES, *MOVING, Seed, Count, Step)

Arrays = Mapping[str, NDArray[Any]]


class LaneProgram:
    """A program whose inputs of a device, and all outputs, have a leading axis of lanes (`autodiff.vmap`).

    Raises SimulationError where the program has no such form.
    """

    def __init__(self, bundle: Bundle, name: str, threads: int) -> None:
        self.program = bundle.program(name)
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
        native = ort.InferenceSession(model.to_bytes(), options, providers=["CPUExecutionProvider"])
        self._session = Session(name, native, error_types())

    def run(self, feed: Arrays, lanes: int) -> dict[str, NDArray[Any]]:
        """The outputs by name, each `[lanes, ...]`. Raises RuntimeProgramError, IndexRangeError."""
        results = dict(zip(self.names, self._session.run(self.names, feed)))
        # What follows from the shared inputs alone is the same in all lanes.
        return {
            name: np.broadcast_to(result, (lanes, *result.shape)) if name in self._same else result
            for name, result in results.items()
        }
