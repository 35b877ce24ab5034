"""SCAFFOLD (Karimireddy et al. 2020, algorithm 1, option II): control variates against client drift.

Device half: `begin` makes the correction c - c_i of every parameter, which each step adds to the gradient; `finish`
computes c_i+ = c_i - c + (start - end) / (a lr), where a is the number of steps. With momentum, which the paper does
not have, a is the sum of the weights of all gradients in the steps (`finish.add_gradient_weights`, as in FedNova): with
the number of steps alone a control variate would be 1 / (1 - momentum) times too long, and the corrections, which the
momentum adds up as well, would drive the devices apart. The device uploads the delta, clipped to an L2 norm of `clip`,
and c_i+ - c_i, clipped to `control_clip`. It keeps c_i plus the clipped change, so that c stays the mean of all c_i.
Server half: parameters + server_lr * mean delta, c + sum of the changes / number of devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from archipel.bundle import Manifest, Program
from archipel.bundle.roles import Broadcast, Update
from archipel.protocol.vector import DecodedSum
from archipel.strategies import averaging
from archipel.strategies.begin import corrections
from archipel.strategies.clipping import choose_clip
from archipel.strategies.device import Correction, DeviceHalf, LocalTraining, MakeProgram, Part, Upload, check_positive
from archipel.strategies.finish import (
    add_clip_factor,
    add_constants,
    add_delta,
    add_gradient_weights,
    add_square,
    report_limits,
    upload_deltas,
)
from archipel.strategies.program import ProgramGraph, device_state
from archipel.strategies.running_statistics import upload_statistics
from archipel.strategies.strategy import Parameters, StepBound, Strategy, Tensors, mean_norm, server_rate

if TYPE_CHECKING:
    import onnx

CONTROL = "control/"
"""Prefix of the names of c: a broadcast, the server's state, and the update's entry with the change of c_i."""
OWN_CONTROL = "own_control/"
"""Prefix of the names of c_i, a state of the device."""


def init(parameters: Mapping[str, np.ndarray]) -> Tensors:
    """c, which begins at 0."""
    return {CONTROL + name: np.zeros_like(array) for name, array in parameters.items()}


def broadcast(state: Tensors) -> Tensors:
    """c, which devices get with the parameters."""
    return dict(state)


def update(
    parameters: Parameters, state: Tensors, total: DecodedSum, cohort: int, hyperparameters: Mapping[str, float]
) -> tuple[Tensors, Tensors]:
    """Equation 5 of the paper. `population` is the number of all devices, 0 where each takes part in every round."""
    # c is the mean over all devices, of which only the cohort's c_i changed.
    devices = max(float(cohort), hyperparameters.get("population", 0.0))
    control = {
        name: (array + total.values[name] / devices).astype(array.dtype, copy=False) for name, array in state.items()
    }
    return averaging.add_deltas(parameters, total, hyperparameters.get("server_lr", 1.0) / cohort), control


def step_bound(manifest: Manifest, hyperparameters: Mapping[str, float] | None, cohort: int) -> StepBound:
    """The parameters move by server_lr D / k, as in federated averaging of devices that all weigh 1.

    c moves by the sum of the changes divided by the number of devices, which is at least k: so at most by the mean
    change, whose norm is control_clip plus rounding.
    """
    deltas, controls = (mean_norm(manifest, kind, cohort) for kind in ("delta", "value"))
    return StepBound(server_rate(manifest, hyperparameters) * deltas, controls)


def device(upload: Upload, *, control_clip: float = 10.0, control_range: float | None = None) -> DeviceHalf:
    """`control_clip` bounds the L2 norm of a change of c_i, `control_range` (default: the same) one element of it."""
    limit_of_change = check_positive(upload.strategy, "control_clip", control_clip)
    span = limit_of_change if control_range is None else check_positive(upload.strategy, "control_range", control_range)
    return DeviceHalf(
        begin=corrections(upload.strategy, _correct),
        parts=(Part(terms=(Correction(),)),),
        finish=_finish(upload, limit_of_change, span),
        optimizer="momentum",
    )


def _correct(graph: ProgramGraph, local: LocalTraining, name: str, output: str) -> str:
    """Add c - c_i of a parameter."""
    return graph.node("Sub", list(_controls(graph, local, name)), output)


def _finish(options: Upload, control_clip: float, control_range: float) -> MakeProgram:
    def make(local: LocalTraining) -> tuple[onnx.ModelProto, Program]:
        upload = replace(choose_clip(options, local), weighting="uniform")
        graph = ProgramGraph("finish", upload.strategy)
        add_constants(graph, upload)
        # (end - start) / (a lr) is minus a mean of the gradients of the round's steps of SGD.
        distance = _distance(graph, local)
        squares, changes = [], []
        for name in local.parameters:
            moved = add_delta(graph, local, name)
            squares.append(add_square(graph, moved, f"{name}.square"))
            gradient = graph.node("Div", [moved, distance], f"{name}.mean_gradient")
            # c_i+ - c_i = -c + (start - end) / (a lr) = -(c + (end - start) / (a lr))
            control, _ = _controls(graph, local, name)
            added = graph.node("Add", [gradient, control], f"{name}.added")
            changes.append(graph.node("Neg", [added], f"{name}.change"))
        shrink = add_clip_factor(graph, squares, graph.own("clip"))
        upload_deltas(graph, local, upload, shrink, "uniform")
        change_squares = [add_square(graph, change, f"{change}.square") for change in changes]
        factor = add_clip_factor(graph, change_squares, graph.constant("control_clip", control_clip), "control_")
        for (name, array), change in zip(local.parameters.items(), changes, strict=True):
            clipped = graph.node("Mul", [change, factor], f"{CONTROL}{name}.update")
            graph.output(
                Update(
                    name=clipped, tensor=CONTROL + name, dtype="float32", shape=array.shape, kind="value",
                    weighting="uniform", range=control_range, bits=upload.other_bits, clip=control_clip,
                )
            )  # fmt: skip
            # The clipped change, the same that the server adds to c: otherwise c would drift from the mean of the c_i.
            _, own = _controls(graph, local, name)
            following = graph.node("Add", [own, clipped], f"{own}.next")
            graph.output(device_state(following, own, array.shape))
        upload_statistics(graph, local, replace(upload, weighting="uniform"))
        report_limits(graph, upload, shrink)
        return graph.build()

    return make


def _controls(graph: ProgramGraph, local: LocalTraining, name: str) -> tuple[str, str]:
    """Add c and c_i of a parameter as inputs; return their names."""
    array, control, own = local.parameters[name], CONTROL + name, OWN_CONTROL + name
    return (
        graph.input(Broadcast(name=control, tensor=control, dtype="float32", shape=array.shape)),
        graph.input(device_state(own, own, array.shape)),
    )


def _distance(graph: ProgramGraph, local: LocalTraining) -> str:
    """Add a lr, at least a tiny number: with a rate of 0 the deltas are 0, and so is their quotient."""
    rate = graph.input(local.hyperparameters["lr"])
    steps = add_gradient_weights(graph, local.momentum)
    product = graph.node("Mul", [steps, rate], graph.own("distance"))
    return graph.node("Max", [product, graph.own("tiny")], graph.own("distance_above_zero"))


STRATEGY = Strategy(
    name="scaffold",
    init=init,
    update=update,
    broadcast=broadcast,
    device=device,
    step_bound=step_bound,
    server_hyperparameters={**averaging.HYPERPARAMETERS, "population": 0.0},
)
