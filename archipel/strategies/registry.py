"""The one table of federated algorithms. To add one: write NAME.py with a STRATEGY, add it here."""

from __future__ import annotations

from archipel.errors import ArchipelError
from archipel.strategies import ditto, dpsgd, fedavg, fedbn, fednova, fedprox, fedrep, lora, scaffold
from archipel.strategies.on_device import feddyn, fedper, fedsgd, ifca, moon, perfedavg, pfedme, qfedavg, reptile
from archipel.strategies.server_optimizers import fedadagrad, fedadam, fedavgm, fedexp, fedyogi
from archipel.strategies.strategy import Strategy

STRATEGIES: dict[str, Strategy] = {
    module.STRATEGY.name: module.STRATEGY
    for module in (
        *(fedavg, fedprox, scaffold, fednova, fedrep, fedbn, ditto, lora, dpsgd),
        *(feddyn, fedper, fedsgd, ifca, moon, perfedavg, pfedme, qfedavg, reptile),
        *(fedavgm, fedadam, fedyogi, fedadagrad, fedexp),
    )
}


def get(name: str) -> Strategy:
    """The strategy of that name. Raises an ArchipelError that lists all names."""
    try:
        return STRATEGIES[name]
    except KeyError:
        raise ArchipelError(f"no strategy {name!r}; there are: {', '.join(sorted(STRATEGIES))}") from None
