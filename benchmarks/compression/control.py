"""What a trained scheme is held against: the float model that got the same training without being made smaller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from archipel.compression import Distil, FineTune, PruneChannels, QuantizationAware, StaticInt8
from archipel.compression.part import Part


def control_parts(parts: Sequence[Part]) -> list[Part]:
    """The training of a recipe alone: same steps, batches, rates, schedules, augmentation and teacher, nothing removed
    or rounded. Running statistics of BatchNormalization are frozen where the scheme freezes them.

    Raises ValueError for a part that it has no rule for.
    """
    found: list[Part] = []
    for part in parts:
        match part:
            case StaticInt8():
                pass
            case QuantizationAware():
                found.append(replace(part.fine_tune, batch_norm="frozen"))
            case PruneChannels(fine_tune=FineTune() as fine_tune):
                found += [fine_tune] * part.iterations
            case PruneChannels():
                pass
            case FineTune() | Distil():
                found.append(part)
            case _:
                raise ValueError(f"{type(part).__name__}: no rule for what the float model should be given instead")
    return found
