"""Federated averaging of models trained with DP-SGD (Abadi et al. 2016, "Deep learning with differential privacy").

Device half: each example's gradient is clipped to an L2 norm of `example_clip`, and the device's exact sampler adds
Gaussian noise of standard deviation noise_multiplier * example_clip to their sum, before it is divided by the batch's
size. This protects each example even from somebody who sees this device's update alone; client.memory.privacy computes
how much. Batches are parts of a permutation, not Poisson samples. Server half: federated averaging.
"""

from __future__ import annotations

from archipel.strategies import averaging
from archipel.strategies.device import ClipExamples, DeviceHalf, Part, Upload, check_not_negative, check_positive
from archipel.strategies.finish import weighted_deltas


def device(upload: Upload, *, example_clip: float = 1.0, noise_multiplier: float = 1.0) -> DeviceHalf:
    """Both options are fixed in the signed graph, so no server can lower the noise. Multiplier 0 only clips."""
    term = ClipExamples(
        check_positive(upload.strategy, "example_clip", example_clip),
        check_not_negative(upload.strategy, "noise_multiplier", noise_multiplier),
    )
    return DeviceHalf(finish=weighted_deltas(upload), parts=(Part(terms=(term,)),))


STRATEGY = averaging.strategy("dpsgd", device, asynchronous=False)
