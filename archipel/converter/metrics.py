"""Which metrics of a local round devices add to the sum: the training's loss and accuracy, and whether they clipped."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from archipel.bundle import PrivacyPolicy
from archipel.bundle.roles import Metric, Noise, Port
from archipel.graph import Model
from archipel.protocol.metrics.training_metrics import CAPPED, CLIPPED
from archipel.training.step import ACCURACY, LOSS

_COUNT_RANGE = 1.0


def with_ranges(programs: Mapping[str, Model], loss_range: float | None, privacy: PrivacyPolicy) -> dict[str, Model]:
    """The programs, whose metrics have a range where devices report them in training rounds.

    `loss_range` is that of the loss (None: no metric is reported). Programs that add noise report none: the metrics
    have no noise, and would tell about examples that it protects. Neither do those of a policy whose `max_value` leaves
    no room for numbers up to 1.
    """
    inputs = [port for model in programs.values() if model.kind in ("train", "finish") for port in model.program.inputs]
    noisy = any(isinstance(port, Noise) for port in inputs)
    if loss_range is None or noisy or privacy.max_value < _COUNT_RANGE:
        return dict(programs)
    train = {LOSS: min(loss_range, privacy.max_value), ACCURACY: _COUNT_RANGE}
    ranges = {"train": train, "finish": dict.fromkeys((CLIPPED, CAPPED), _COUNT_RANGE)}
    return {name: _with_ranges(model, ranges.get(str(model.kind), {})) for name, model in programs.items()}


def _with_ranges(program: Model, ranges: Mapping[str, float]) -> Model:
    def ranged(port: Port) -> Port:
        stated = ranges.get(port.name) if isinstance(port, Metric) else None
        return port if stated is None else msgspec.structs.replace(port, range=stated)

    if ranges:
        outputs = tuple(map(ranged, program.program.outputs))
        program.signature = msgspec.structs.replace(program.program, outputs=outputs)
    return program
