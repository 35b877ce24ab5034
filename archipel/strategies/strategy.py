"""What every federated algorithm provides: an `init`/`update` pair on the server, a description of its device half."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from archipel.protocol.vector import DecodedSum
from archipel.strategies.device import MakeDevice

Tensors = dict[str, np.ndarray]

InitState = Callable[[Mapping[str, np.ndarray]], Tensors]
"""parameters -> the server half's state at the first round."""

UpdateModel = Callable[
    [Mapping[str, np.ndarray], Tensors, DecodedSum, int, Mapping[str, float]], tuple[Tensors, Tensors]
]
"""parameters, state, sum of the cohort's updates, cohort size, hyperparameters -> new parameters, new state."""

MakeBroadcast = Callable[[Tensors], Tensors]
"""state -> what the devices get beside the parameters this round."""


def no_state(parameters: Mapping[str, np.ndarray]) -> Tensors:
    return {}


def no_broadcast(state: Tensors) -> Tensors:
    return {}


@dataclass(frozen=True)
class Strategy:
    """One federated algorithm. The server half is NumPy only; `device` describes what the converter makes graphs of."""

    name: str
    update: UpdateModel
    device: MakeDevice
    init: InitState = no_state
    broadcast: MakeBroadcast = no_broadcast
    server_hyperparameters: Mapping[str, float] = field(default_factory=dict)
    """Those that the server half reads, with their defaults; the others of a plan go to the devices."""
    asynchronous: bool = False
    """Whether updates that began with different versions may be summed: only deltas matter, nothing is sent back."""
