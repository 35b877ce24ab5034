"""Federated averaging of models trained with DP-SGD (Abadi et al. 2016, "Deep learning with differential privacy").

Device half: each example's gradient is held to an L2 norm of `example_clip`, and their sum gets Gaussian noise of
standard deviation noise_multiplier * example_clip, drawn by the device's exact sampler, before it is divided by the
batch's size. So each example is protected even from who sees this device's update alone; client.memory.privacy says how
much. Batches are parts of a permutation, not Poisson samples. Server half: federated averaging.
"""

from __future__ import annotations

from archipel.strategies import averaging
from archipel.strategies.device import ClipExamples, DeviceHalf, Part, Upload, not_negative, positive
from archipel.strategies.finish import weighted_deltas
from archipel.strategies.strategy import Strategy


def device(upload: Upload, *, example_clip: float = 1.0, noise_multiplier: float = 1.0) -> DeviceHalf:
    """Both are fixed in the signed graph, so no server can lower the noise. A noise_multiplier of 0 only clips."""
    term = ClipExamples(
        positive(upload.strategy, "example_clip", example_clip),
        not_negative(upload.strategy, "noise_multiplier", noise_multiplier),
    )
    return DeviceHalf(finish=weighted_deltas(upload), parts=(Part(terms=(term,)),))


STRATEGY = Strategy(
    name="dpsgd",
    update=averaging.update,
    device=device,
    step_bound=averaging.step_bound,
    server_hyperparameters=averaging.HYPERPARAMETERS,
)
