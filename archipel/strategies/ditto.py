"""Ditto (Li et al. 2021, "Ditto: fair and robust federated learning through personalization", algorithm 1).

Device half: the device trains the global model as in federated averaging. Then it trains a personal copy of every
parameter, which begins as the first global model that it received, on the loss + lambda / 2 |copy - global model as
received|^2. `predict` and `evaluate` use the copy, which never leaves the device. Server half: federated averaging.
"""

from __future__ import annotations

from archipel.strategies import averaging
from archipel.strategies.device import DeviceHalf, Part, Pull, Upload, check_not_negative, check_whole
from archipel.strategies.finish import weighted_deltas


def device(upload: Upload, *, strength: float = 0.1, personal_epochs: int | None = None) -> DeviceHalf:
    """`strength` is the default of the hyperparameter lambda; `personal_epochs` None: those of the global model."""
    pull = Pull("lambda", check_not_negative(upload.strategy, "strength", strength))
    epochs = None if personal_epochs is None else check_whole(upload.strategy, "personal_epochs", personal_epochs, 1)
    return DeviceHalf(
        finish=weighted_deltas(upload),
        # `fit` runs the program called "train", so learning outside of rounds moves the copy.
        parts=(Part("train.global"), Part(trains="copies", epochs=epochs, terms=(pull,))),
    )


STRATEGY = averaging.strategy("ditto", device)
