"""The clip of updates where the publisher gives none: chosen with the model, and adapted from round to round.

The best clip depends on model, learning rate and data, and changes while a model learns. So the bundle's `finish` reads
it as a hyperparameter, `update_clip`, which the server sends with each plan, up to a largest one that the publisher
signs. Devices report whether they clipped as 0 or 1 in the secure sum, and the server moves the clip towards the value
above which a share TARGET of the updates lies: c exp(RATE (clipped share - TARGET)), the geometric update of Andrew et
al. 2021, "Differentially private learning with adaptive clipping", with exact counts and therefore a larger rate.

It starts with the norm of the parameters: a round that moves a model by less than its own size is not clipped.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from archipel.bundle.roles import Hyperparameter
from archipel.protocol.bounds import joint_norm
from archipel.protocol.metrics.training_metrics import UPDATE_CLIP

if TYPE_CHECKING:
    from archipel.strategies.device import LocalTraining, Upload

TARGET = 0.1
"""The share of clipped updates that the server aims at."""
RATE = 1.0
MOST, LEAST = 4.0, 1e-3
"""The largest and the smallest clip that a plan may have, in units of the first one."""
_SMALLEST_NORM = 1.0
"""A model that begins with zeros has no norm to go by."""
_SPREAD = 16.0
"""An element may be so many times the root mean square of the elements of the longest update."""


def choose_clip(upload: Upload, local: LocalTraining, share: float = 1.0) -> Upload:
    """`upload` with a clip: its own, or one chosen with the model's parameters.

    `share`: where `finish` clips something smaller than the deltas, by how much.
    """
    if upload.clip is not None:
        return upload
    start = min(share * max(joint_norm(local.parameters.values()), _SMALLEST_NORM), local.max_clip)
    most = min(MOST * start, local.max_clip)
    size = sum(array.size for array in local.parameters.values())
    # The longest update of n elements that are about equal has elements of most / sqrt(n). A range as large as the norm
    # would round the updates of a large model, which are far shorter, to a few steps.
    spread = most * min(1.0, _SPREAD / math.sqrt(max(size, 1)))
    return dataclasses.replace(
        upload, clip=most, start=start, value_range=spread if upload.value_range is None else upload.value_range
    )


def clip_port(upload: Upload, start: float) -> Hyperparameter:
    """The input of `finish` with the round's clip."""
    return Hyperparameter(
        name=UPDATE_CLIP, dtype="float32", shape=(), default=start, minimum=LEAST * start, maximum=upload.bound
    )


def next_clip(clip: float, clipped: int, devices: int, port: Hyperparameter) -> float:
    """The clip of the round after one with `clip` in which `clipped` of `devices` updates were clipped."""
    moved = clip * math.exp(RATE * (clipped / devices - TARGET))
    return min(max(moved, port.minimum), port.maximum)
