"""The parts of a federated algorithm: an `init`/`update` pair on the server, and a description of its device half."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from archipel.bundle import Manifest
from archipel.bundle.roles import LowRank
from archipel.errors import PolicyError
from archipel.protocol.bounds import Group, entries, groups, joint_norm, mean_bound
from archipel.protocol.uploads import upload_program
from archipel.protocol.vector import DecodedSum, Layout
from archipel.strategies.device import MakeDevice

Tensors = dict[str, np.ndarray]
Parameters = Mapping[str, np.ndarray]

InitState = Callable[[Mapping[str, np.ndarray]], Tensors]
"""parameters -> the server half's state at the first round."""

UpdateModel = Callable[[Parameters, Tensors, DecodedSum, int, Mapping[str, float]], tuple[Tensors, Tensors]]
"""parameters, state, sum of the cohort's updates, cohort size, hyperparameters -> new parameters, new state.

The sum has a weight above 0: `Strategy.apply` sees to that.
"""


@dataclass(frozen=True)
class StepBound:
    """The largest L2 norms by which one step of the server can change all parameters together, and all of the state.

    It does not include the rounding of the new parameters to float32, which `storage_rounding` bounds.
    """

    parameters: float
    state: float = 0.0


BoundStep = Callable[[Manifest, Mapping[str, float] | None, int], StepBound]
"""manifest, the server half's hyperparameters, cohort size -> how far a step can go whose sum passed Layout.check_sum.

It reads only what the publisher signed: the update ports, and the policy's `max_server_lr`. Hyperparameters None: the
largest that the policy allows, as a device assumes, which does not know them. A name that is missing has its default.
Raises PolicyError for hyperparameters beyond the policy, or beyond the strategy's own bounds of them.
"""


@dataclass(frozen=True)
class Began:
    """What the device of a single update began with: the `parameters` of a version after which `staleness` others were
    made, for which its changes count `discount` times."""

    parameters: Parameters
    staleness: int = 0
    discount: float = 1.0


Mix = Callable[[Parameters, DecodedSum, Began, Manifest, Mapping[str, float]], DecodedSum]
"""present parameters, a single update as a sum, what it began with, manifest, hyperparameters -> the sum to apply."""

MakeBroadcast = Callable[[Tensors], Tensors]
"""state -> the tensors that devices get beside the parameters this round."""


def no_state(parameters: Mapping[str, np.ndarray]) -> Tensors:
    return {}


def no_broadcast(state: Tensors) -> Tensors:
    return {}


@dataclass(frozen=True)
class Strategy:
    """One federated algorithm. The server half needs NumPy only; the converter makes graphs from the `device` half.

    Example: see `archipel.strategies.get`.
    """

    name: str
    update: UpdateModel
    device: MakeDevice
    step_bound: BoundStep
    init: InitState = no_state
    broadcast: MakeBroadcast = no_broadcast
    server_hyperparameters: Mapping[str, float] = field(default_factory=dict)
    """Hyperparameters that the server half reads, with their defaults; a plan's others go to the devices."""
    asynchronous: bool = False
    """Whether updates that began with different versions may be summed. The server must need deltas only, and devices
    no tensors of its state."""
    mix: Mix | None = None
    """Changes a single update before the step, where the server needs to know what its device began with: then tasks
    are asynchronous and plain, and have a cohort of 1."""
    averages: bool = True
    """Whether what each device sends, divided by its weight, is its answer to the same question, so that a robust rule
    over these may take the mean's place."""

    def apply(
        self,
        parameters: Mapping[str, np.ndarray],
        state: Tensors,
        total: DecodedSum,
        cohort: int,
        hyperparameters: Mapping[str, float],
    ) -> tuple[Tensors, Tensors]:
        """One step of the server half: new parameters, new state.

        Arguments:
            parameters: those of the version before, float arrays by name.
            state: the strategy's own tensors by name, at first those of `init`.
            total: the decoded sums over the cohort.
            cohort: how many devices are in them.
            hyperparameters: of the round, by name.
        """
        if total.total_weight(cohort) <= 0:
            # No survivor has examples: there is nothing to average, and nothing to divide by.
            return dict(parameters), state
        return self.update(parameters, state, total, cohort, hyperparameters)


def training_layout(manifest: Manifest) -> Layout:
    """The entries that `finish` makes, of which the server half computes its step; metrics move no model."""
    return Layout.of(upload_program(manifest, "training"))


def server_rate(manifest: Manifest, hyperparameters: Mapping[str, float] | None, default: float = 1.0) -> float:
    """server_lr; the largest that the policy allows where `hyperparameters` is None. Raises PolicyError beyond that."""
    most = manifest.privacy.max_server_lr
    if hyperparameters is None:
        return most
    rate = hyperparameters.get("server_lr", default)
    if not 0 <= rate <= most:
        raise PolicyError(
            f"server_lr: {rate:g} is outside the bundle's privacy policy, which allows 0 to {most:g} (max_server_lr)"
        )
    return rate


def server_value(hyperparameters: Mapping[str, float], name: str, default: float, low: float, high: float) -> float:
    """A hyperparameter of the server half whose bounds are the strategy's own. Raises PolicyError beyond them."""
    value = hyperparameters.get(name, default)
    # `not` also refuses NaN.
    if not low <= value <= high:
        raise PolicyError(f"{name}: {value:g} is not from {low:g} to {high:g}, the bounds of this strategy")
    return value


def mean_norm(manifest: Manifest, kind: str, cohort: int) -> float:
    """The largest L2 norm of the entries of one `kind`, "delta" or "value", in a sum divided by the sum of weights."""
    layout, squares = training_layout(manifest), 0.0
    for group in select_groups(layout, kind):
        # A group without a clip has a bound for each element: n of at most b have a norm of at most b sqrt(n).
        elements = 1.0 if group.norm is not None else math.sqrt(entries(group.ports[0]))
        # A matrix is at most as long as its factors times the root of 2.
        gain = 2.0 if any(isinstance(port.carries, LowRank) for port in group.ports) else 1.0
        squares += gain * (mean_bound(layout.updates, group, cohort) * elements) ** 2
    # The groups have no entries in common, so their norms add up as squares.
    return math.sqrt(squares)


def changed_elements(manifest: Manifest) -> int:
    """The number of elements of all parameters that devices change."""
    sizes = {spec.name: math.prod(int(dim) for dim in spec.shape) for spec in manifest.parameters}
    deltas = [port for port in training_layout(manifest).updates if port.kind == "delta"]
    return sum(sizes[name] for port in deltas for name in (port.carries.parameters if port.carries else (port.tensor,)))


def select_groups(layout: Layout, kind: str) -> list[Group]:
    """The groups of the entries of one `kind`, "delta" or "value"."""
    return [group for group in groups(layout.updates) if group.ports[0].kind == kind]


def storage_rounding(parameters: Mapping[str, np.ndarray]) -> float:
    """The largest L2 norm that rounding these parameters to float32 adds to a step: 2^-24 of their norm."""
    return 2.0**-24 * joint_norm(parameters.values())
