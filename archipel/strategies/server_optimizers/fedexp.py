"""FedExP (Jhunjhunwala et al. 2023, "FedExP: speeding up federated averaging via extrapolation", algorithm 1).

Where devices pull in different directions, their mean is much shorter than they are, and the server may go further.
Device half: that of federated averaging, and the squared norm of the clipped delta times the weight.
Server half: with d the weighted mean of the deltas and S that of the squared norms,
parameters + server_lr * max(1, S / (2 (|d|^2 + epsilon))) * d.

The squared norm is rounded to `bits` bits, and what rounding leaves is one more entry: most updates are far shorter
than the clip, and their squares so small that one entry would lose them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from archipel.bundle import Manifest, Program
from archipel.bundle.roles import Update
from archipel.protocol.bounds import mean_bound
from archipel.protocol.bounds import step as encoding_step
from archipel.protocol.vector import DecodedSum
from archipel.strategies import averaging
from archipel.strategies.clipping import choose_clip
from archipel.strategies.device import DeviceHalf, LocalTraining, MakeProgram, Upload
from archipel.strategies.finish import (
    add_examples,
    add_weight,
    clip_deltas,
    report_limits,
    upload_deltas,
    upload_weight,
)
from archipel.strategies.program import ProgramGraph
from archipel.strategies.running_statistics import upload_statistics
from archipel.strategies.strategy import (
    Parameters,
    StepBound,
    Strategy,
    Tensors,
    mean_norm,
    select_groups,
    server_rate,
    server_value,
    training_layout,
)

if TYPE_CHECKING:
    import onnx

SQUARE_NORM, REST = "fedexp/square_norm", "fedexp/square_norm_rest"
"""The names of the update's entries with the squared norm times the weight, and with what rounding left of it."""
_EPSILON = 1e-3
_SMALLEST, _LARGEST = 1e-6, 1e3


def update(
    parameters: Parameters, state: Tensors, total: DecodedSum, cohort: int, hyperparameters: Mapping[str, float]
) -> tuple[Tensors, Tensors]:
    """The server half, equation 5 of the paper, with weights."""
    weight = total.total_weight(cohort)
    squares = (float(total.values[SQUARE_NORM]) + float(total.values.get(REST, 0.0))) / weight
    mean_square = sum(float(np.vdot(delta, delta)) for delta in total.deltas.values()) / weight**2
    further = max(1.0, squares / (2 * (mean_square + hyperparameters.get("epsilon", _EPSILON))))
    rate = hyperparameters.get("server_lr", 1.0)
    return averaging.add_deltas(parameters, total, rate * further / weight), state


def step_bound(manifest: Manifest, hyperparameters: Mapping[str, float] | None, cohort: int) -> StepBound:
    """The step is server_lr max(|d|, S |d| / (2 (|d|^2 + epsilon))). check_sum bounds |d| and S.

    x / (x^2 + epsilon) rises up to x = sqrt(epsilon) and falls from there, so the second term is largest at
    |d| = sqrt(epsilon), or at the bound of |d| where that is smaller.
    """
    layout, mean = training_layout(manifest), mean_norm(manifest, "delta", cohort)
    squares = sum(mean_bound(layout.updates, group, cohort) for group in select_groups(layout, "value"))
    # Who is not told epsilon reckons with the smallest.
    epsilon = _SMALLEST
    if hyperparameters is not None:
        epsilon = server_value(hyperparameters, "epsilon", _EPSILON, _SMALLEST, _LARGEST)
    worst = min(mean, math.sqrt(epsilon))
    furthest = squares * worst / (2 * (worst**2 + epsilon))
    return StepBound(server_rate(manifest, hyperparameters) * max(mean, furthest))


def device(upload: Upload) -> DeviceHalf:
    """One phase over all parameters."""
    return DeviceHalf(finish=_finish(upload))


def _finish(options: Upload) -> MakeProgram:
    def make(local: LocalTraining) -> tuple[onnx.ModelProto, Program]:
        upload = choose_clip(options, local)
        graph = ProgramGraph("finish", upload.strategy)
        shrink = factor = clip_deltas(graph, local, upload)
        # The smaller of norm and clip, and not norm times factor: an infinite norm times 0 is no number.
        norm = graph.node("Min", [graph.own("norm_above_zero"), graph.own("clip")], graph.own("clipped_norm"))
        square = graph.node("Mul", [norm, norm], graph.own("square"))
        if upload.weighting == "examples":
            add_examples(graph)
            weight = add_weight(graph)
            factor = graph.node("Mul", [factor, weight], graph.own("factor"))
            square = graph.node("Mul", [square, weight], graph.own("weighted_square"))
        upload_deltas(graph, local, upload, factor, upload.weighting)
        _upload_square(graph, upload, square)
        upload_statistics(graph, local, upload)
        upload_weight(graph, upload)
        report_limits(graph, upload, shrink)
        return graph.build()

    return make


def _upload_square(graph: ProgramGraph, upload: Upload, square: str) -> None:
    """Add the outputs SQUARE_NORM, a whole number of steps of its encoding, and REST."""
    # An element of a device of weight w is clamped to w times the range, and the smallest weight is 1 / weight_cap.
    spread = upload.weight_cap if upload.weighting == "examples" else 1
    coarse = _entry(SQUARE_NORM, upload, upload.bound**2)
    unit = encoding_step(coarse)
    steps = graph.node("Div", [square, graph.constant("unit", unit)], graph.own("steps"))
    whole = graph.node("Round", [steps], graph.own("whole_steps"))
    graph.node("Mul", [whole, graph.own("unit")], SQUARE_NORM)
    graph.node("Sub", [square, SQUARE_NORM], REST)
    graph.output(coarse)
    graph.output(_entry(REST, upload, spread * unit / 2))


def _entry(name: str, upload: Upload, span: float) -> Update:
    return Update(
        name=name, tensor=name, dtype="float32", shape=(), kind="value",
        weighting=upload.weighting, range=span, bits=upload.other_bits,
    )  # fmt: skip


STRATEGY = Strategy(
    name="fedexp",
    update=update,
    device=device,
    step_bound=step_bound,
    server_hyperparameters={**averaging.HYPERPARAMETERS, "epsilon": _EPSILON},
)
