"""IFCA (Ghosh et al. 2020, "An efficient framework for clustered federated learning", algorithm 1, model averaging).

There are k models, and every device gets them all, as stacks [k, ...]. Device half: it measures the loss of each model
on all of its examples, and trains the one of the least. Its update is a stack that is 0 but for that model, and so is
the stack of weights, with the device's weight in that model's place. So a sum, secure or not, is of each cluster by
itself: sum of weight * delta and sum of weight for each model.
Server half: each model + server_lr * the weighted mean of its own devices; one without devices stays.

Which model a device trains is not told, but where one device of a cohort is alone with a model, the sum has its update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from archipel.bundle import Manifest
from archipel.bundle.roles import Update
from archipel.errors import BoundError, ConversionError
from archipel.protocol.bounds import SLACK
from archipel.protocol.vector import DecodedSum
from archipel.strategies import averaging
from archipel.strategies.device import (
    DeviceHalf,
    LocalTraining,
    Models,
    Part,
    Upload,
    check_positive,
    check_whole,
)
from archipel.strategies.finish import add_delta, weight_bits, weighted_deltas
from archipel.strategies.program import ProgramGraph, choice_state
from archipel.strategies.strategy import Parameters, StepBound, Strategy, Tensors

WEIGHTS = "ifca/weights"
"""The name of the update's entry with the device's weight in the place of its model, [k]."""


def update(
    parameters: Parameters, state: Tensors, total: DecodedSum, cohort: int, hyperparameters: Mapping[str, float]
) -> tuple[Tensors, Tensors]:
    """The paper's line 10, for model averaging. Raises BoundError for weights that do not add up to the cohort's."""
    weights, whole = total.values[WEIGHTS], total.total_weight(cohort)
    # Both are rounded alike, so the sums are equal; float32 sums of plain rounds are equal but for its last digits.
    if not (weights.min() >= 0 and abs(float(weights.sum()) - whole) <= SLACK * whole):
        raise BoundError(
            f"rejected: the models' weights are {weights.tolist()}, but those of {cohort} devices add up to {whole:g}"
        )
    return averaging.add_slices(parameters, total, weights, hyperparameters.get("server_lr", 1.0)), state


def step_bound(manifest: Manifest, hyperparameters: Mapping[str, float] | None, cohort: int) -> StepBound:
    """That of the models' means, see `averaging.slices_bound`."""
    return averaging.slices_bound(manifest, hyperparameters, cohort, WEIGHTS)


def device(upload: Upload, *, models: int = 2, spread: float = 0.5, seed: int = 0) -> DeviceHalf:
    """`models`: the paper's k, 2 to 64. `spread`: how far the models begin from the given one, above 0 to 1: at 1 they
    have nothing of it, which is right for a model that was not trained before. `seed` draws them."""
    name = upload.strategy
    count = check_whole(name, "models", models, 2)
    if count > 64:
        raise ConversionError(f"strategy {name!r}: models must be a whole number from 2 to 64, is {models}")
    if check_positive(name, "spread", spread) > 1:
        raise ConversionError(f"strategy {name!r}: spread must be a number above 0 to 1, is {spread}")
    if upload.compress is not None:
        raise ConversionError(
            f"strategy {name!r}: compress spreads each device's rounding over all models; leave it out"
        )
    return DeviceHalf(
        models=Models(count, float(spread), check_whole(name, "seed", seed, 0)),
        parts=(Part(program="choose", trains="choice", epochs=1), Part()),
        # One of the models moves, and the norm by which a clip is chosen is that of all.
        finish=weighted_deltas(upload, _add_own, keep=_upload_weights(upload, count), clip_share=1 / math.sqrt(count)),
    )


def _place(graph: ProgramGraph, count: int, output: str, rank: int = 1) -> str:
    """Add 1 in the place of the device's model and 0 elsewhere, [count, 1, ...] of so many axes."""
    choice = graph.input(choice_state())
    number = graph.node("Cast", [choice], f"{output}.number", to=1)
    every = np.arange(count, dtype=np.float32).reshape(-1, *[1] * (rank - 1))
    numbers = graph.array(graph.own(f"numbers_{rank}"), every)
    return graph.node("Cast", [graph.node("Equal", [numbers, number], f"{output}.is_here")], output, to=1)


def _add_own(graph: ProgramGraph, local: LocalTraining, name: str) -> str:
    """Add the change of the device's model; what a weight decay did to the others is not the device's to say."""
    count, *rest = local.parameters[name].shape
    place = _place(graph, count, f"{name}.place", 1 + len(rest))
    return graph.node("Mul", [add_delta(graph, local, name), place], f"{name}.own_delta")


def _upload_weights(upload: Upload, count: int) -> Callable[[ProgramGraph, LocalTraining], None]:
    def add(graph: ProgramGraph, local: LocalTraining) -> None:
        place, bits = _place(graph, count, graph.own("place")), upload.other_bits
        if upload.weighting == "examples":
            # In as many bits as the weight itself: both are rounded alike, so that the sums are equal.
            bits = weight_bits(upload)
            graph.node("Mul", [place, graph.own("weight")], WEIGHTS)
        else:
            graph.node("Identity", [place], WEIGHTS)
        graph.output(
            Update(
                name=WEIGHTS, tensor=WEIGHTS, dtype="float32", shape=(count,), kind="value",
                weighting=upload.weighting, range=1.0, bits=bits, clip=1.0,
            )
        )  # fmt: skip

    return add


STRATEGY = Strategy(
    name="ifca",
    update=update,
    device=device,
    step_bound=step_bound,
    server_hyperparameters=averaging.HYPERPARAMETERS,
    # A device changes one of the models and sends zeros for the others, which are no opinion about these.
    averages=False,
)
