"""MOON (Li et al. 2021, "Model-contrastive federated learning", algorithm 1).

Device half: to the loss of a step comes strength * -log(e^(s_g / t) / (e^(s_g / t) + e^(s_p / t))), where s_g is the
cosine between the features that the trained model and the received one make of an example, s_p that between those of
the trained model and of the device's model of its last round. So features are drawn to the global model's, away from
what the device alone made of them. `finish` keeps the device's model for the next round; in its first one that is the
model of the bundle. Server half: federated averaging.
"""

from __future__ import annotations

from archipel.errors import ConversionError
from archipel.strategies import averaging
from archipel.strategies.device import PREVIOUS, Contrast, DeviceHalf, LocalTraining, Part, Upload, check_positive
from archipel.strategies.finish import weighted_deltas
from archipel.strategies.program import ProgramGraph, device_state


def device(
    upload: Upload, *, features: str | None = None, strength: float = 1.0, temperature: float = 0.5
) -> DeviceHalf:
    """`features` names the tensor of the graph that has them; None: what the last layer reads.

    `strength` is the paper's mu, `temperature` its tau; both are constants of the signed graph.
    """
    name = upload.strategy
    if features is not None and (not isinstance(features, str) or not features):
        raise ConversionError(f"strategy {name!r}: features must be the name of a tensor, is {features!r}")
    contrast = Contrast(
        features, check_positive(name, "strength", strength), check_positive(name, "temperature", temperature)
    )
    return DeviceHalf(finish=weighted_deltas(upload, keep=_keep_model), parts=(Part(terms=(contrast,)),))


def _keep_model(graph: ProgramGraph, local: LocalTraining) -> None:
    """Add the model that the device ended with as what it keeps."""
    for name, array in local.parameters.items():
        tensor = PREVIOUS + name
        following = graph.node("Identity", [name], f"{tensor}.next")
        graph.output(device_state(following, tensor, array.shape, init=name))


STRATEGY = averaging.strategy("moon", device)
