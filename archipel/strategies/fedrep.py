"""FedRep (Collins et al. 2021, "Exploiting shared representations for personalized federated learning", algorithm 1).

Device half: the device trains first the personal head alone for `personal_epochs`, then the shared representation alone
for the epochs of the round. It uploads only the representation. Server half: federated averaging of that.
"""

from __future__ import annotations

from collections.abc import Sequence

from archipel.strategies import averaging
from archipel.strategies.device import DeviceHalf, Part, Upload, check_patterns, check_whole
from archipel.strategies.finish import weighted_deltas


def device(upload: Upload, *, personal: str | Sequence[str], personal_epochs: int = 5) -> DeviceHalf:
    """`personal` are globs of the head's tensors."""
    epochs = check_whole(upload.strategy, "personal_epochs", personal_epochs, 1)
    return DeviceHalf(
        finish=weighted_deltas(upload),
        personal=check_patterns(upload.strategy, "personal", personal),
        # `fit` runs the program called "train", so learning outside of rounds moves the head.
        parts=(Part(trains="personal", epochs=epochs), Part("train.shared", trains="shared")),
    )


STRATEGY = averaging.strategy("fedrep", device)
