"""FedBN (Li et al. 2021, "FedBN: federated learning on non-IID features via local batch normalization").

Device half: scale and bias of every BatchNormalization are personal, and its running statistics stay on the device,
where other strategies average them. Server half: federated averaging of the other parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

from archipel.strategies import averaging
from archipel.strategies.device import DeviceHalf, Upload, check_patterns
from archipel.strategies.finish import weighted_deltas


def device(upload: Upload, *, personal: str | Sequence[str] = ()) -> DeviceHalf:
    """`personal` are globs of further tensors that stay on the device, such as those of a LayerNormalization."""
    return DeviceHalf(
        finish=weighted_deltas(upload),
        personal=check_patterns(upload.strategy, "personal", personal),
        personal_operators=("BatchNormalization",),
    )


STRATEGY = averaging.strategy("fedbn", device)
