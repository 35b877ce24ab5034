"""FedSGD (McMahan et al. 2017, algorithm 1 with E = 1 and B infinite): one gradient of each device a round.

Device half: one step of plain SGD, on a batch of `batch_size` examples; with a `batch_size` of at least a device's
number of examples on all of them, as in the paper. The delta is -lr times the gradient, weighted by examples.
Server half: federated averaging, which here is a step of SGD with the mean gradient at the rate lr * server_lr.

With `momentum` b the device keeps m <- b m + (1 - b) delta from round to round and uploads m (Karimireddy et al. 2021,
"Learning from history for Byzantine robust optimization", algorithm 2): what single batches add to a gradient averages
out on the device, so that a robust rule has less to tell from an attack.
"""

from __future__ import annotations

from functools import partial

from archipel.strategies import averaging
from archipel.strategies.device import DeviceHalf, LocalTraining, Part, Upload, check_share
from archipel.strategies.finish import add_delta, weighted_deltas
from archipel.strategies.program import ProgramGraph, device_state


def device(upload: Upload, *, momentum: float = 0.0) -> DeviceHalf:
    """One step over all parameters, whatever `epochs` says. `momentum` is of the device, 0 to below 1."""
    beta = check_share(upload.strategy, "momentum", momentum)
    add = partial(_add_remembered, beta) if beta else None
    return DeviceHalf(finish=weighted_deltas(upload, add), parts=(Part(steps=1),), optimizer="sgd")


def _add_remembered(beta: float, graph: ProgramGraph, local: LocalTraining, name: str) -> str:
    """Add m of a parameter, which the device also keeps."""
    delta, tensor, shape = add_delta(graph, local, name), f"momentum/{name}", local.parameters[name].shape
    before = graph.input(device_state(tensor, tensor, shape))
    old = graph.node("Mul", [before, graph.constant("momentum", beta)], f"{name}.old")
    new = graph.node("Mul", [delta, graph.constant("rest", 1.0 - beta)], f"{name}.new")
    after = graph.node("Add", [old, new], f"{name}.remembered")
    graph.output(device_state(after, tensor, shape))
    return after


STRATEGY = averaging.strategy("fedsgd", device)
