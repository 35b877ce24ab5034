"""Federated averaging (McMahan et al. 2017, algorithm 1), with clipped and weighted updates.

Device half: delta = end - start over all parameters, clipped to an L2 norm of `clip`, times the device's weight
min(examples, weight_cap) / weight_cap. The weight itself is one more entry of the update.
Server half: parameters + server_lr * sum of deltas / sum of weights.
"""

from __future__ import annotations

from archipel.strategies import averaging
from archipel.strategies.device import DeviceHalf, Upload
from archipel.strategies.finish import weighted_deltas


def device(upload: Upload) -> DeviceHalf:
    """One phase over all parameters."""
    return DeviceHalf(finish=weighted_deltas(upload))


STRATEGY = averaging.strategy("fedavg", device)
