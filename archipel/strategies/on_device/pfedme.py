"""pFedMe (T Dinh et al. 2020, "Personalized federated learning with Moreau envelopes", algorithm 1).

Device half: the device has a personal model p, which stays there, and a local one w, which begins as received. A step
makes p better on its batch and pulls it to w (loss + lambda / 2 |p - w|^2), and every `inner_steps` steps w moves
towards p, by local_lr lambda (w - p). The device uploads w - received. `predict` and `evaluate` use p.
Server half: federated averaging, where the paper's beta is server_lr.

Other than in the paper, each inner step has a batch of its own, as SGD on the envelope has; p goes on from round to
round; and the pull is a proximal step, which no rate makes diverge.
"""

from __future__ import annotations

from archipel.strategies import averaging
from archipel.strategies.device import DeviceHalf, Follows, LocalTraining, Part, Upload, check_positive, check_whole
from archipel.strategies.finish import add_delta, weighted_deltas
from archipel.strategies.program import ProgramGraph, round_state


def device(upload: Upload, *, strength: float = 15.0, local_lr: float = 0.05, inner_steps: int = 1) -> DeviceHalf:
    """`strength` and `local_lr` are the defaults of the hyperparameters lambda and local_lr.

    Keep their product below 1: at 1, w becomes p. `inner_steps` are the steps of p for one of w.
    """
    name = upload.strategy
    follows = Follows(
        check_positive(name, "strength", strength),
        check_positive(name, "local_lr", local_lr),
        check_whole(name, "inner_steps", inner_steps, 1),
    )
    return DeviceHalf(
        finish=weighted_deltas(upload, _add_moved), parts=(Part(trains="copies", terms=(follows,)),), optimizer="sgd"
    )


def _add_moved(graph: ProgramGraph, local: LocalTraining, name: str) -> str:
    """Add how far w moved, which the steps keep as a state; the parameter itself stays as received."""
    stays = add_delta(graph, local, name)
    moved = graph.input(round_state(f"{name}.moved", local.parameters[name].shape))
    return graph.node("Add", [stays, moved], f"{name}.followed")


STRATEGY = averaging.strategy("pfedme", device)
