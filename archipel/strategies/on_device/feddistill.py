"""Federated distillation (Jeong et al. 2018, "Communication-efficient on-device machine learning", algorithm 1): mean
outputs travel, and no weights, so that devices may have different models.

What devices share is a table: for each class the mean output (the logits) that models have for its examples. Device
half: to the loss of a step comes `strength` times the cross entropy between the outputs and the softmax of the class's
row. After the training the device runs its model over its examples and uploads, for each class that it has, how far
its own mean is from the table, times a weight by the class's number of examples, and these weights.
Server half: each row + server_lr * the weighted mean of its own devices; a class that no device had keeps its row.

A device's own mean is in the table, where the paper leaves it out for that device, which needs single uploads. Where
one device of a cohort alone has a class, the sum has its mean outputs of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from archipel.bundle import Manifest, Program
from archipel.bundle.roles import Start, Update
from archipel.errors import BoundError, ConversionError
from archipel.protocol.bounds import SLACK
from archipel.protocol.vector import DecodedSum
from archipel.strategies import averaging
from archipel.strategies.device import (
    LOGIT_COUNTS,
    LOGIT_SUMS,
    LOGITS,
    MOST_LOGIT,
    DeviceHalf,
    Distill,
    LocalTraining,
    MakeProgram,
    Part,
    Upload,
    check_not_negative,
)
from archipel.strategies.finish import (
    add_clip_factor,
    add_constants,
    add_examples,
    add_square,
    add_weight,
    report_limits,
    upload_weight,
    weight_bits,
)
from archipel.strategies.program import ProgramGraph, round_state
from archipel.strategies.strategy import Parameters, StepBound, Strategy, Tensors

if TYPE_CHECKING:
    import onnx

WEIGHTS = "feddistill/weights"
"""The name of the update's entry with the weight of each class, [classes]."""


def update(
    parameters: Parameters, state: Tensors, total: DecodedSum, cohort: int, hyperparameters: Mapping[str, float]
) -> tuple[Tensors, Tensors]:
    """The rows' means. Raises BoundError for weights of a class that are no sum of what devices have."""
    weights, whole = total.values[WEIGHTS], total.total_weight(cohort)
    if not (weights.min() >= 0 and weights.max() <= whole * (1 + SLACK)):
        raise BoundError(
            f"rejected: the classes' weights are {weights.tolist()}, but those of {cohort} devices add up to {whole:g}"
        )
    return averaging.add_slices(parameters, total, weights, hyperparameters.get("server_lr", 1.0)), state


def step_bound(manifest: Manifest, hyperparameters: Mapping[str, float] | None, cohort: int) -> StepBound:
    """That of the rows' means, see `averaging.slices_bound`."""
    return averaging.slices_bound(manifest, hyperparameters, cohort, WEIGHTS)


def device(upload: Upload, *, strength: float = 1.0) -> DeviceHalf:
    """`strength` is the paper's gamma, a constant of the signed graph; 0 learns alone."""
    if upload.compress is not None:
        raise ConversionError(
            f"strategy {upload.strategy!r}: compress spreads each device's rounding over all classes; leave it out"
        )
    distill = Distill(check_not_negative(upload.strategy, "strength", strength))
    return DeviceHalf(
        logits=True,
        parts=(Part(trains="personal", terms=(distill,)), Part(program="tell", trains="logits", epochs=1)),
        finish=_finish(upload),
    )


def _finish(options: Upload) -> MakeProgram:
    def make(local: LocalTraining) -> tuple[onnx.ModelProto, Program]:
        graph = ProgramGraph("finish", options.strategy)
        shape = local.parameters[LOGITS].shape
        classes, furthest = shape[0], 2 * MOST_LOGIT
        # Outputs are bounded, so any device keeps to this clip; a smaller one makes the table follow in more rounds.
        clip = min(furthest * classes, local.max_clip) if options.clip is None else options.clip
        span = min(furthest, clip) if options.value_range is None else options.value_range
        upload = replace(options, clip=clip, value_range=span)
        add_constants(graph, upload)
        counts = graph.input(round_state(LOGIT_COUNTS, (classes,)))
        delta = _add_delta(graph, shape, counts)
        shrink = add_clip_factor(graph, [add_square(graph, delta, f"{delta}.square")], graph.own("clip"))
        bits = upload.bits
        if upload.weighting == "examples":
            add_examples(graph)
            add_weight(graph)
            bits = weight_bits(upload)
            capped = graph.node("Min", [counts, graph.own("cap")], graph.own("counts_capped"))
            graph.node("Div", [capped, graph.own("cap")], WEIGHTS)
        else:
            graph.node("Min", [counts, graph.own("one")], WEIGHTS)
        column = graph.node("Reshape", [WEIGHTS, _column(graph)], graph.own("column"))
        weighted = graph.node("Mul", [delta, column], graph.own("weighted"))
        entry = graph.node("Mul", [weighted, shrink], f"{LOGITS}.update")
        graph.output(
            Update(
                name=entry, tensor=LOGITS, dtype="float32", shape=shape, kind="delta",
                weighting=upload.weighting, range=upload.range, bits=upload.bits, clip=upload.bound,
            )
        )  # fmt: skip
        graph.output(
            Update(
                name=WEIGHTS, tensor=WEIGHTS, dtype="float32", shape=(classes,), kind="value",
                weighting=upload.weighting, range=1.0, bits=bits,
            )
        )  # fmt: skip
        upload_weight(graph, upload)
        report_limits(graph, upload, shrink)
        return graph.build()

    return make


def _add_delta(graph: ProgramGraph, shape: tuple[int, ...], counts: str) -> str:
    """Add how far the device's mean outputs are from the table's rows, 0 for a class that it does not have."""
    sums = graph.input(round_state(LOGIT_SUMS, shape))
    table = graph.input(Start(name=f"{LOGITS}.start", tensor=LOGITS, dtype="float32", shape=shape))
    whole = graph.node("Max", [counts, graph.own("one")], graph.own("at_least_one"))
    each = graph.node("Reshape", [whole, _column(graph)], graph.own("examples_of_each"))
    mean = graph.node("Div", [sums, each], graph.own("mean"))
    has = graph.node("Cast", [graph.node("Greater", [counts, graph.constant("none", 0.0)], graph.own("is_here"))],
                     graph.own("has"), to=1)  # fmt: skip
    row = graph.node("Reshape", [has, _column(graph)], graph.own("has_row"))
    away = graph.node("Sub", [mean, table], graph.own("away"))
    return graph.node("Mul", [away, row], f"{LOGITS}.delta")


def _column(graph: ProgramGraph) -> str:
    """The shape [classes, 1], int64."""
    return graph.array(graph.own("column_shape"), np.array([-1, 1], np.int64))


STRATEGY = Strategy(
    name="feddistill",
    update=update,
    device=device,
    step_bound=step_bound,
    server_hyperparameters=averaging.HYPERPARAMETERS,
    averages=False,
)
