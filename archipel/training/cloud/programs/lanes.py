"""A program of a bundle for many clients at once: each has a lane, an index of a leading axis."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from archipel.autodiff import vmap
from archipel.bundle import Bundle
from archipel.bundle.roles import (
    Count,
    Example,
    ExampleWeight,
    Feature,
    Label,
    Noise,
    Parameter,
    Personal,
    Port,
    Seed,
    State,
    Step,
)
from archipel.engine_registry import Refusal
from archipel.errors import ArchipelError, TrainingError
from archipel.graph.importing.bundled import read_bundled
from archipel.graph.importing.loading import normalize
from archipel.graph.model import Model
from archipel.training.cloud.graphs.recognizing import recognize_gradients
from archipel.training.cloud.programs.engine import TorchSession

BATCH = (Example, Label, ExampleWeight, Feature)
MOVING = (Parameter, Personal, State)
OF_A_CLIENT = (*BATCH, *MOVING, Seed, Noise, Count)


def has_lanes(port: Port, own_steps: bool) -> bool:
    """Whether clients differ in what the port has; `own_steps`: in the number of their step, too."""
    return isinstance(port, OF_A_CLIENT) or (own_steps and isinstance(port, Step))


class LaneProgram:
    """A program whose inputs of a client, and all outputs, have a leading axis of lanes.

    The graph is that of the program with a lane axis (`autodiff.vmap`), in `TorchModule`: on a CPU that is faster than
    `torch.func.vmap` of the program's own module (benchmarks/cohort.py).

    Arguments:
        own_steps: whether each lane has a number of the step of its own.

    Raises TrainingError where PyTorch cannot run it.
    """

    def __init__(self, bundle: Bundle, name: str, device: torch.device, threads: int, own_steps: bool) -> None:
        self.program = bundle.program(name)
        path = bundle.program_path(name)
        over = [port.name for port in self.program.inputs if has_lanes(port, own_steps)]
        try:
            single = Model(normalize(read_bundled(path.parent, path.name), parameters=()))
            # Before the lanes: with them a gradient is written otherwise.
            model = vmap(recognize_gradients(single), over)
            self._session = TorchSession(name, model, threads, device)
        except (ArchipelError, Refusal) as error:
            raise TrainingError(f"cohort: program {name!r} cannot run for many clients at once: {error}") from None
        ranks = {info.name: len(info.shape) for info in single.outputs}
        self._same = {info.name for info in model.outputs if len(info.shape) == ranks[info.name]}
        self._names = [port.name for port in self.program.outputs]

    def run(self, feed: Mapping[str, torch.Tensor], lanes: int) -> dict[str, torch.Tensor]:
        """The outputs, each [lanes, ...], on the device. Raises RuntimeProgramError, IndexRangeError."""
        results = dict(zip(self._names, self._session.run_held(self._names, feed)))
        # What follows from the shared inputs alone is the same in all lanes.
        return {
            name: result.expand(lanes, *result.shape) if name in self._same else result
            for name, result in results.items()
        }
