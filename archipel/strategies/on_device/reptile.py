"""Reptile (Nichol et al. 2018, "On first-order meta-learning algorithms", algorithm 2), with a device as a task.

Device half: some steps of SGD (or another optimizer) on all tensors; every device weighs 1.
Server half: parameters + server_lr * mean delta: the model moves that share of the way to the mean of what the devices
made of it. So with `server_lr` 1, the default, it is federated averaging without weights; the paper's outer rate is
below 1 and falls to 0 during the training. The model is a start from which a device learns in a few steps: `fit` makes
a device's own model of it.
"""

from __future__ import annotations

from dataclasses import replace

from archipel.strategies import averaging
from archipel.strategies.device import DeviceHalf, Upload
from archipel.strategies.finish import weighted_deltas


def device(upload: Upload) -> DeviceHalf:
    """One phase over all parameters, with uniform weights."""
    return DeviceHalf(finish=weighted_deltas(replace(upload, weighting="uniform")))


STRATEGY = averaging.strategy("reptile", device)
