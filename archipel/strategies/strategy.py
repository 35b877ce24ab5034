"""What every federated algorithm provides: its server half as `init`/`update` pairs, its device half as a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from archipel.bundle import Program
from archipel.protocol.vector import DecodedSum

if TYPE_CHECKING:
    import onnx

Tensors = dict[str, np.ndarray]

InitState = Callable[[Mapping[str, np.ndarray]], Tensors]
"""parameters -> the server half's state at the first round."""

UpdateModel = Callable[
    [Mapping[str, np.ndarray], Tensors, DecodedSum, int, Mapping[str, float]], tuple[Tensors, Tensors]
]
"""parameters, state, sum of the cohort's updates, cohort size, hyperparameters -> new parameters, new state."""

MakeBroadcast = Callable[[Tensors], Tensors]
"""state -> what the devices get beside the parameters this round."""

FinishGraph = Callable[..., "tuple[onnx.ModelProto, Program]"]
"""parameters (values by name) and the strategy's own options -> the `finish` graph and its signature. Needs onnx."""


@dataclass(frozen=True)
class Strategy:
    """One federated algorithm. The server half is NumPy only; `finish` imports onnx when it is called."""

    name: str
    init: InitState
    update: UpdateModel
    broadcast: MakeBroadcast
    finish: FinishGraph
    server_hyperparameters: Mapping[str, float]
    """Those that the server half reads, with their defaults; the others of a plan go to the devices."""


def no_state(parameters: Mapping[str, np.ndarray]) -> Tensors:
    return {}


def no_broadcast(state: Tensors) -> Tensors:
    return {}
