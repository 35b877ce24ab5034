"""FedDyn (Acar et al. 2021, "Federated learning based on dynamic regularization", algorithm 1).

Device half: a device keeps g_k, its gradient at the model that it ended with; each step's gradient is
grad L_k(w) - g_k + alpha (w - the model as received). `finish` renews g_k <- g_k - alpha * delta, with the delta as it
is uploaded, clipped. So what all devices minimize together has the minimum of the mean loss, however they differ.
Server half: with h' <- h' + sum of deltas / number of devices, the parameters move by server_lr (mean delta + h'). (The
paper's h is -alpha h', so that the server need not know alpha.)

What the server remembers is bounded: h' has an L2 norm of at most MEMORY times the longest mean delta so far. The
paper has no such bound; h' vanishes where the training converges, and an attacked sum would stay in it for good.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from archipel.bundle import Manifest, Program
from archipel.protocol.bounds import joint_norm
from archipel.protocol.vector import DecodedSum
from archipel.strategies import averaging
from archipel.strategies.begin import corrections
from archipel.strategies.clipping import choose_clip
from archipel.strategies.device import (
    Correction,
    DeviceHalf,
    LocalTraining,
    MakeProgram,
    Part,
    Pull,
    Upload,
    check_positive,
)
from archipel.strategies.finish import clip_deltas, report_limits, upload_deltas
from archipel.strategies.program import ProgramGraph, device_state
from archipel.strategies.running_statistics import upload_statistics
from archipel.strategies.strategy import Parameters, StepBound, Strategy, Tensors, mean_norm, server_rate

if TYPE_CHECKING:
    import onnx

ALPHA = "alpha"
"""The hyperparameter of the devices' steps and of `finish`."""
DRIFT, LONGEST = "drift/", "feddyn/longest"
"""Prefix of the names of h', and the norm of the longest mean delta so far, in the server's state."""
OWN_GRADIENT = "own_gradient/"
"""Prefix of the names of g_k, a state of the device."""
MEMORY = 10.0
"""h' is at most this many times as long as the longest mean delta so far."""


def init(parameters: Mapping[str, np.ndarray]) -> Tensors:
    """h', which begins at 0."""
    return {LONGEST: np.zeros((), np.float32), **{DRIFT + name: np.zeros_like(a) for name, a in parameters.items()}}


def update(
    parameters: Parameters, state: Tensors, total: DecodedSum, cohort: int, hyperparameters: Mapping[str, float]
) -> tuple[Tensors, Tensors]:
    """The paper's lines 10 and 11. `population` is the number of all devices, 0 where each takes part in each round."""
    devices = max(float(cohort), hyperparameters.get("population", 0.0))
    rate = hyperparameters.get("server_lr", 1.0)
    longest = max(float(state[LONGEST]), joint_norm(total.deltas.values()) / cohort)
    # In float64, the type of the sums; each result is rounded once.
    drift = {name: state[DRIFT + name] + total.deltas[name] / devices for name in parameters}
    far = joint_norm(drift.values())
    kept = min(1.0, MEMORY * longest / far) if far > 0 else 1.0
    moved = {
        name: (array + rate * (total.deltas[name] / cohort + kept * drift[name])).astype(array.dtype)
        for name, array in parameters.items()
    }
    following = {DRIFT + name: (kept * drift[name]).astype(array.dtype) for name, array in parameters.items()}
    return moved, {LONGEST: np.array(longest, np.float32), **following}


def step_bound(manifest: Manifest, hyperparameters: Mapping[str, float] | None, cohort: int) -> StepBound:
    """The mean delta d has |d| <= D, as in federated averaging of devices that all weigh 1, and |h'| <= MEMORY D.

    So the parameters move by server_lr (1 + MEMORY) D at most. h' moves by D at most: the ball to which it is cut only
    grows, so what was in it stays, and cutting moves no two points apart. The longest delta grows by D or less.
    """
    mean = mean_norm(manifest, "delta", cohort)
    return StepBound(server_rate(manifest, hyperparameters) * (1 + MEMORY) * mean, math.sqrt(2) * mean)


def device(upload: Upload, *, alpha: float = 0.1) -> DeviceHalf:
    """`alpha` is the default of the hyperparameter alpha; the paper's values are from 0.001 to 0.1."""
    pull = Pull(ALPHA, check_positive(upload.strategy, "alpha", alpha))
    return DeviceHalf(
        begin=corrections(upload.strategy, _correct), parts=(Part(terms=(Correction(), pull)),), finish=_finish(upload)
    )


def _correct(graph: ProgramGraph, local: LocalTraining, name: str, output: str) -> str:
    """Add -g_k of a parameter."""
    return graph.node("Neg", [_own_gradient(graph, local, name)], output)


def _finish(options: Upload) -> MakeProgram:
    def make(local: LocalTraining) -> tuple[onnx.ModelProto, Program]:
        upload = replace(choose_clip(options, local), weighting="uniform")
        graph = ProgramGraph("finish", upload.strategy)
        shrink = clip_deltas(graph, local, upload)
        alpha = graph.input(local.hyperparameters[ALPHA])
        upload_deltas(graph, local, upload, shrink, "uniform")
        for name, array in local.parameters.items():
            # Of the clipped delta, the same that the server adds to h': otherwise h' would drift from the mean of g_k.
            own = _own_gradient(graph, local, name)
            change = graph.node("Mul", [f"{name}.update", alpha], f"{own}.change")
            following = graph.node("Sub", [own, change], f"{own}.next")
            graph.output(device_state(following, own, array.shape))
        upload_statistics(graph, local, upload)
        report_limits(graph, upload, shrink)
        return graph.build()

    return make


def _own_gradient(graph: ProgramGraph, local: LocalTraining, name: str) -> str:
    """Add g_k of a parameter as an input."""
    tensor = OWN_GRADIENT + name
    return graph.input(device_state(tensor, tensor, local.parameters[name].shape))


STRATEGY = Strategy(
    name="feddyn",
    init=init,
    update=update,
    device=device,
    step_bound=step_bound,
    server_hyperparameters={**averaging.HYPERPARAMETERS, "population": 0.0},
)
