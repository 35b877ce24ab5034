"""Ditto (Li et al. 2021, "Ditto: fair and robust federated learning through personalization", algorithm 1).

Device half: the global model is trained as in federated averaging; then a personal copy of every parameter, which
begins as the global model when it was first received, is trained on the loss + lambda / 2 |copy - global model as
received|^2. The copy is what `predict` and `evaluate` use; it never leaves. Server half: federated averaging.
"""

from __future__ import annotations

from archipel.strategies import averaging
from archipel.strategies.device import DeviceHalf, Part, Pull, Upload, not_negative, whole
from archipel.strategies.finish import weighted_deltas
from archipel.strategies.strategy import Strategy


def device(upload: Upload, *, strength: float = 0.1, personal_epochs: int | None = None) -> DeviceHalf:
    """`strength` is the default of the hyperparameter lambda; `personal_epochs` None: as many as the global model's."""
    pull = Pull("lambda", not_negative(upload.strategy, "strength", strength))
    epochs = None if personal_epochs is None else whole(upload.strategy, "personal_epochs", personal_epochs, 1)
    return DeviceHalf(
        finish=weighted_deltas(upload),
        # What is called "train" is also what `fit` runs: learning on the device alone moves the copy.
        parts=(Part("train.global"), Part(trains="copies", epochs=epochs, terms=(pull,))),
    )


STRATEGY = Strategy(
    name="ditto",
    update=averaging.update,
    device=device,
    step_bound=averaging.step_bound,
    server_hyperparameters=averaging.HYPERPARAMETERS,
    asynchronous=True,
)
