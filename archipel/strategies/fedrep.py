"""FedRep (Collins et al. 2021, "Exploiting shared representations for personalized federated learning", algorithm 1).

Device half: first the personal head alone for `personal_epochs`, then the shared representation alone for the epochs of
the round; only the representation is uploaded. Server half: that of federated averaging, over the representation.
"""

from __future__ import annotations

from collections.abc import Sequence

from archipel.strategies import averaging
from archipel.strategies.device import DeviceHalf, Part, Upload, patterns, whole
from archipel.strategies.finish import weighted_deltas
from archipel.strategies.strategy import Strategy


def device(upload: Upload, *, personal: str | Sequence[str], personal_epochs: int = 5) -> DeviceHalf:
    """`personal` are globs of the head's tensors."""
    epochs = whole(upload.strategy, "personal_epochs", personal_epochs, 1)
    return DeviceHalf(
        finish=weighted_deltas(upload),
        personal=patterns(upload.strategy, "personal", personal),
        # What is called "train" is also what `fit` runs: learning on the device alone moves the head.
        parts=(Part(trains="personal", epochs=epochs), Part("train.shared", trains="shared")),
    )


STRATEGY = Strategy(
    name="fedrep",
    update=averaging.update,
    device=device,
    step_bound=averaging.step_bound,
    server_hyperparameters=averaging.HYPERPARAMETERS,
    asynchronous=True,
)
