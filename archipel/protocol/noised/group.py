"""What noise can cover: the clipped changes of the parameters, all with equal weights."""

from __future__ import annotations

from archipel.errors import PolicyError
from archipel.protocol.bounds import Group, groups
from archipel.protocol.metrics.training_metrics import CLAMPED, DEVICES, TRAINING
from archipel.protocol.vector import Layout

_METRICS = (TRAINING, CLAMPED, DEVICES)


def noised_group(layout: Layout, strategy: str, mechanism: str) -> Group:
    """The clipped changes, which alone get noise. Raises PolicyError where devices send anything else.

    Arguments:
        layout: of the uploads; entries of metrics and counts do not matter.
        strategy, mechanism: by name, for the message.
    """
    name = f"mechanism {mechanism!r}: strategy {strategy!r}" if strategy else f"mechanism {mechanism!r}"
    own = [port for port in layout.updates if not port.name.startswith(_METRICS)]
    for port in own:
        if port.kind == "weight" or port.weighting != "uniform":
            raise PolicyError(
                f"{name}: devices have weights of their own, such as their examples, which the sum would tell; give "
                "the strategy the option weighting = 'uniform' when the bundle is made, or use one that has it"
            )
        if port.carries is not None:
            raise PolicyError(f"{name}: updates are packed; make the bundle without the strategy option compress")
        if port.kind in ("mean", "variance"):
            raise PolicyError(
                f"{name}: devices send running statistics of BatchNormalization, which have no clip; use strategy "
                "'fedbn', or another normalization"
            )
        if port.kind != "delta" or port.clip is None:
            raise PolicyError(
                f"{name}: devices send {port.tensor!r} beside their clipped changes, and noise covers these alone; "
                "fedavg, fedprox, fedavgm, fedadam, dpsgd and others send nothing else"
            )
        if port.noise:
            raise PolicyError(f"{name}: devices add noise to their updates already; leave mechanism away")
    found = groups(own)
    if len(found) != 1:
        raise PolicyError(f"{name}: devices send {len(found)} groups of changes with clips of their own, expected one")
    return found[0]
