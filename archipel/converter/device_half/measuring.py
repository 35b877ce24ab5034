"""The parts of a round that train nothing: what they measure, and of which values."""

from __future__ import annotations

from archipel.converter.device_half.roles import Division, assign_roles, assign_start
from archipel.graph import Model
from archipel.strategies.device import (
    CHOICE,
    LOGIT_COUNTS,
    LOGIT_SUMS,
    MEASURED_COUNT,
    MEASURED_LOSS,
    MOST_LOGIT,
    DeviceHalf,
    Part,
)
from archipel.training.evaluation import choose_graph, logits_graph, measure_graph
from archipel.training.losses import Loss
from archipel.training.step import StepOptions

MEASURING = ("nothing", "choice", "logits")
"""What `Part.trains` says of such a part."""


def measuring_program(
    part: Part, model: Model, loss: Loss, options: StepOptions, half: DeviceHalf, division: Division, strategy: str
) -> Model:
    """The program of such a part. Raises ConversionError where it measures the received model, and tensors stay."""
    batch_norm = options.get("batch_norm", "train")
    if part.trains == "logits":
        totals = (LOGIT_SUMS, LOGIT_COUNTS)
        names = list(division.personal)
        return assign_roles(logits_graph(model, loss, names, totals, MOST_LOGIT, batch_norm=batch_norm), division)
    totals = (MEASURED_LOSS, MEASURED_COUNT)
    if part.trains == "choice" and half.models is not None:
        choosing = choose_graph(model, loss, division.all, CHOICE, half.models.count, totals)
        return assign_start(choosing, division, strategy, kept=(CHOICE,))
    measuring = measure_graph(model, loss, division.all, totals, batch_norm=batch_norm)
    return assign_start(measuring, division, strategy)
