"""FedProx (Li et al. 2020, "Federated optimization in heterogeneous networks", algorithm 2).

Device half: every step adds mu (w - the model as received) to the gradient, which keeps devices with unusual data or
many steps from drifting away. Server half: federated averaging.
"""

from __future__ import annotations

from archipel.strategies import averaging
from archipel.strategies.device import DeviceHalf, Part, Pull, Upload, check_not_negative
from archipel.strategies.finish import weighted_deltas


def device(upload: Upload, *, mu: float = 0.01) -> DeviceHalf:
    """`mu` is the default of the hyperparameter mu."""
    pull = Pull("mu", check_not_negative(upload.strategy, "mu", mu))
    return DeviceHalf(finish=weighted_deltas(upload), parts=(Part(terms=(pull,)),))


STRATEGY = averaging.strategy("fedprox", device)
