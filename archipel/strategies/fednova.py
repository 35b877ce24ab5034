"""FedNova (Wang et al. 2020, "Tackling the objective inconsistency problem", section 4).

In plain averaging, devices with more steps pull the model towards their own objective. Device half: delta divided by a,
the L1 norm of the weights with which SGD sums up its gradients: the number of steps t, or with momentum m
(t - m (1 - m^t) / (1 - m)) / (1 - m). `clip` bounds the norm of that quotient. The device uploads a, too, weighted like
the deltas. Server half: parameters + server_lr * (weighted mean of a) * (weighted mean of the quotients).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from archipel.bundle import Manifest, Program
from archipel.bundle.roles import Update
from archipel.protocol.vector import DecodedSum
from archipel.strategies import averaging
from archipel.strategies.clipping import choose_clip
from archipel.strategies.device import DeviceHalf, LocalTraining, MakeProgram, Upload, check_whole
from archipel.strategies.finish import (
    add_clip_factor,
    add_constants,
    add_delta,
    add_examples,
    add_gradient_weights,
    add_square,
    add_weight,
    report_limits,
    upload_deltas,
    upload_weight,
)
from archipel.strategies.program import ProgramGraph
from archipel.strategies.running_statistics import upload_statistics
from archipel.strategies.strategy import Parameters, StepBound, Strategy, Tensors, mean_norm, server_rate

if TYPE_CHECKING:
    import onnx

STEPS = "fednova/steps"
"""The name of the update's entry with a times the weight."""
_SHARE = 1 / 16
"""The clip bounds a mean step, which is a part of a round's change: the first clip is that of 16 steps in one line."""


def update(
    parameters: Parameters, state: Tensors, total: DecodedSum, cohort: int, hyperparameters: Mapping[str, float]
) -> tuple[Tensors, Tensors]:
    """The server half, equation 6 of the paper with tau_eff = the weighted mean of a."""
    weight = total.total_weight(cohort)
    steps = float(total.values[STEPS]) / weight
    return averaging.add_deltas(parameters, total, hyperparameters.get("server_lr", 1.0) * steps / weight), state


def step_bound(manifest: Manifest, hyperparameters: Mapping[str, float] | None, cohort: int) -> StepBound:
    """The step is server_lr (A / W) (D / W): D / W as in federated averaging, A the sum of the weighted a.

    check_sum accepts |A| <= step_cap (W + k h) + r, so |A| / W is largest for the smallest W, too. Each factor has its
    own bound: server_lr (step_cap ...) (clip ...). Honest devices that make step_cap steps can reach the product.
    """
    deltas, steps = (mean_norm(manifest, kind, cohort) for kind in ("delta", "value"))
    return StepBound(server_rate(manifest, hyperparameters) * steps * deltas)


def device(upload: Upload, *, step_cap: int = 256) -> DeviceHalf:
    """`step_cap` bounds a, and is its range in the fixed-point encoding."""
    cap = check_whole(upload.strategy, "step_cap", step_cap, 1)
    return DeviceHalf(finish=_finish(upload, cap), optimizer="momentum")


def _finish(options: Upload, cap: int) -> MakeProgram:
    def make(local: LocalTraining) -> tuple[onnx.ModelProto, Program]:
        upload = choose_clip(options, local, share=_SHARE)
        graph = ProgramGraph("finish", upload.strategy)
        add_constants(graph, upload)
        steps = _capped_weights(graph, local.momentum, cap)
        # The quotient is clipped, not the delta: the server multiplies the mean quotient with the mean of a.
        squares = []
        for name in local.parameters:
            mean = graph.node("Div", [add_delta(graph, local, name), steps], f"{name}.per_step")
            squares.append(add_square(graph, mean, f"{name}.square"))
        shrink = factor = add_clip_factor(graph, squares, graph.own("clip"))
        if upload.weighting == "examples":
            add_examples(graph)
            weight = add_weight(graph)
            factor = graph.node("Mul", [factor, weight], graph.own("factor"))
            steps = graph.node("Mul", [steps, weight], graph.own("weighted_steps"))
        upload_deltas(graph, local, upload, factor, upload.weighting, of="per_step")
        graph.output(
            Update(
                name=graph.node("Identity", [steps], STEPS), tensor=STEPS, dtype="float32", shape=(),
                kind="value", weighting=upload.weighting, range=float(cap), bits=upload.other_bits,
            )
        )  # fmt: skip
        upload_statistics(graph, local, upload)
        upload_weight(graph, upload)
        report_limits(graph, upload, shrink)
        return graph.build()

    return make


def _capped_weights(graph: ProgramGraph, momentum: float, cap: int) -> str:
    """min(a, cap), but at least a tiny number: a device without steps has the delta 0, which it divides by this."""
    value = add_gradient_weights(graph, momentum)
    capped = graph.node("Min", [value, graph.constant("step_cap", float(cap))], graph.own("capped"))
    return graph.node("Max", [capped, graph.own("tiny")], graph.own("a"))


STRATEGY = Strategy(
    name="fednova",
    update=update,
    device=device,
    step_bound=step_bound,
    server_hyperparameters=averaging.HYPERPARAMETERS,
)
