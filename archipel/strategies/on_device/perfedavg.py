"""Per-FedAvg, first order (Fallah et al. 2020, "Personalized federated learning: a meta-learning approach", "FO").

Device half: w is trained so that one step of a device's own makes a good model of it. Steps come in pairs: the first
tries p = w - inner_lr grad(w) on a batch, the second moves w by -lr grad(p) on the next batch, where p was. Second
derivatives are left out. The device uploads w; a last step without a second one does not count. Server half: federated
averaging.
"""

from __future__ import annotations

from archipel.strategies import averaging
from archipel.strategies.device import DeviceHalf, LocalTraining, Part, Tries, Upload, check_positive
from archipel.strategies.finish import add_delta, weighted_deltas
from archipel.strategies.program import ProgramGraph, round_state


def device(upload: Upload, *, inner_lr: float = 0.01) -> DeviceHalf:
    """`inner_lr` is the default of the hyperparameter inner_lr, the rate of the step that a device makes of its own."""
    tries = Tries(check_positive(upload.strategy, "inner_lr", inner_lr))
    return DeviceHalf(finish=weighted_deltas(upload, _add_delta), parts=(Part(terms=(tries,)),), optimizer="sgd")


def _add_delta(graph: ProgramGraph, local: LocalTraining, name: str) -> str:
    """Add the delta of w: the parameter may be p, which lies apart from it by the state `tried`."""
    ended = add_delta(graph, local, name)
    tried = graph.input(round_state(f"{name}.tried", local.parameters[name].shape))
    return graph.node("Sub", [ended, tried], f"{name}.learned")


STRATEGY = averaging.strategy("perfedavg", device)
