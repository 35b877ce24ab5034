"""What every federated algorithm provides: an `init`/`update` pair on the server, a description of its device half."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from archipel.bundle import Manifest
from archipel.bundle.roles import Update
from archipel.errors import PolicyError
from archipel.protocol.bounds import Group, entries, groups, mean_bound
from archipel.protocol.uploads import upload_layout
from archipel.protocol.vector import DecodedSum, Layout
from archipel.strategies.device import MakeDevice

Tensors = dict[str, np.ndarray]

InitState = Callable[[Mapping[str, np.ndarray]], Tensors]
"""parameters -> the server half's state at the first round."""

UpdateModel = Callable[
    [Mapping[str, np.ndarray], Tensors, DecodedSum, int, Mapping[str, float]], tuple[Tensors, Tensors]
]
"""parameters, state, sum of the cohort's updates, cohort size, hyperparameters -> new parameters, new state."""


@dataclass(frozen=True)
class StepBound:
    """The largest L2 norms of what one step of the server can change: all parameters together, and all of the state.

    Not in it: that the new parameters are rounded to float32, by `storage_rounding` of them at most.
    """

    parameters: float
    state: float = 0.0


BoundStep = Callable[[Manifest, Mapping[str, float] | None, int], StepBound]
"""manifest, the server half's hyperparameters, cohort size -> how far a step can go whose sum passed Layout.check_sum.

All that it rests on is signed: the update ports, and the policy's `max_server_lr`. Hyperparameters None: whatever the
policy allows (what a device reckons with, which is not told them); a name that is missing has its default. Pure
arithmetic. Raises PolicyError for hyperparameters beyond the policy.
"""

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
    step_bound: BoundStep
    init: InitState = no_state
    broadcast: MakeBroadcast = no_broadcast
    server_hyperparameters: Mapping[str, float] = field(default_factory=dict)
    """Those that the server half reads, with their defaults; the others of a plan go to the devices."""
    asynchronous: bool = False
    """Whether updates that began with different versions may be summed: only deltas matter, nothing is sent back."""


def training_layout(manifest: Manifest) -> Layout:
    return upload_layout(manifest, "training")


def server_rate(manifest: Manifest, hyperparameters: Mapping[str, float] | None) -> float:
    """server_lr, or the largest that the policy allows where it is not told. Raises PolicyError beyond the policy."""
    most = manifest.privacy.max_server_lr
    if hyperparameters is None:
        return most
    rate = hyperparameters.get("server_lr", 1.0)
    if not 0 <= rate <= most:
        raise PolicyError(
            f"server_lr: {rate:g} is outside the bundle's privacy policy, which allows 0 to {most:g} (max_server_lr)"
        )
    return rate


def mean_norm(updates: Sequence[Update], of: Sequence[Group], cohort: int) -> float:
    """The largest L2 norm of these groups together, in a sum divided by the sum of weights."""
    squares = 0.0
    for group in of:
        elements = 1.0 if group.norm is not None else math.sqrt(entries(group.ports[0]))
        squares += (mean_bound(updates, group, cohort) * elements) ** 2
    return math.sqrt(squares)


def groups_of(layout: Layout, kind: str) -> list[Group]:
    """Those of the deltas, or of the values."""
    return [group for group in groups(layout.updates) if group.ports[0].kind == kind]


def storage_rounding(parameters: Mapping[str, np.ndarray]) -> float:
    """The largest norm of what rounding parameters of this size to float32 adds to a step: 2^-24 of their norm."""
    squares = sum(float(np.square(array, dtype=np.float64).sum()) for array in parameters.values())
    return 2.0**-24 * math.sqrt(squares)
