"""FedSGD (McMahan et al. 2017, algorithm 1 with E = 1 and B infinite): one gradient of each device a round.

Device half: one step of plain SGD, on a batch of `batch_size` examples; with a `batch_size` of at least a device's
number of examples on all of them, as in the paper. The delta is -lr times the gradient, weighted by examples.
Server half: federated averaging, which here is a step of SGD with the mean gradient at the rate lr * server_lr.
"""

from __future__ import annotations

from archipel.strategies import averaging
from archipel.strategies.device import DeviceHalf, Part, Upload
from archipel.strategies.finish import weighted_deltas


def device(upload: Upload) -> DeviceHalf:
    """One step over all parameters, whatever `epochs` says."""
    return DeviceHalf(finish=weighted_deltas(upload), parts=(Part(steps=1),), optimizer="sgd")


STRATEGY = averaging.strategy("fedsgd", device)
