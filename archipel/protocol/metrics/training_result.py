"""The metrics of a training's round, read from its sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from archipel.protocol.metrics.training_metrics import CAPPED, CLAMPED, CLIPPED, DEVICES, TRAINING
from archipel.protocol.operator.results import RoundResult
from archipel.protocol.vector import DecodedSum


def split_metrics(total: DecodedSum, devices: int) -> tuple[RoundResult | None, DecodedSum]:
    """The metrics of a training's round and the rest of its sum, which alone makes the next version.

    The result is None where the bundle has its devices report no metrics.
    """
    own = {name: float(array) for name, array in total.values.items() if name.startswith((TRAINING, CLAMPED, DEVICES))}
    if not own:
        return None, total
    rest = replace(total, values={name: array for name, array in total.values.items() if name not in own})
    # Without an uploaded weight each device weighs 1. A sum of weights of 0 has no means.
    weight = total.total_weight(devices)
    means = {name: value / weight for name, value in own.items()} if weight > 0 else {}
    counts = {name: round(value) for name, value in _of(own, DEVICES).items()}
    result = RoundResult(
        devices=devices,
        contributors=devices,
        metrics={training_name(name): mean for name, mean in _of(means, TRAINING).items()},
        clamped={training_name(name): share for name, share in _of(means, CLAMPED).items() if share > 0},
        clipped=counts.get(CLIPPED),
        capped=counts.get(CAPPED),
    )
    return result, rest


def training_name(metric: str) -> str:
    """The name of a mean over the steps of a round: of the training form, on the examples that it trains on."""
    return f"training {metric}"


def _of(values: Mapping[str, float], prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
