"""The one table of federated algorithms. To add one: write NAME.py with a STRATEGY, add it here."""

from __future__ import annotations

from archipel.errors import ArchipelError
from archipel.strategies import ditto, dpsgd, fedavg, fedbn, fednova, fedprox, fedrep, lora, scaffold
from archipel.strategies.on_device import (
    feddistill,
    feddyn,
    fedper,
    fedsgd,
    ifca,
    moon,
    perfedavg,
    pfedme,
    qfedavg,
    reptile,
)
from archipel.strategies.server_optimizers import fedadagrad, fedadam, fedasync, fedavgm, fedexp, fedyogi
from archipel.strategies.strategy import Strategy

STRATEGIES: dict[str, Strategy] = {
    module.STRATEGY.name: module.STRATEGY
    for module in (
        *(fedavg, fedprox, scaffold, fednova, fedrep, fedbn, ditto, lora, dpsgd),
        *(feddyn, fedper, fedsgd, ifca, feddistill, moon, perfedavg, pfedme, qfedavg, reptile),
        *(fedavgm, fedadam, fedyogi, fedadagrad, fedexp, fedasync),
    )
}


def get(name: str) -> Strategy:
    """The strategy of that name. Raises an ArchipelError that lists all names.

    Example:
        strategy = get("fedprox")
        print(strategy.name)
    """
    try:
        return STRATEGIES[name]
    except KeyError:
        raise ArchipelError(f"no strategy {name!r}; there are: {', '.join(sorted(STRATEGIES))}") from None


def misfit(strategy: Strategy, mode: str, privacy: str, cohort: int) -> str:
    """Why a task with these settings cannot have the strategy, beginning with the setting; "" where it can."""
    if strategy.mix is not None:
        for setting, given, needed in (
            ("mode", mode, "asynchronous"),
            ("privacy", privacy, "plain"),
            ("cohort", cohort, 1),
        ):
            if given != needed:
                return (
                    f"{setting}: {given}, but strategy {strategy.name!r} mixes in each update by itself: it needs mode "
                    "asynchronous, privacy plain and a cohort of 1 (a secure sum has 2 devices or more); fedavg and "
                    "others work without"
                )
    if mode == "asynchronous" and not strategy.asynchronous:
        able = sorted(name for name, each in STRATEGIES.items() if each.asynchronous)
        return (
            f"mode: strategy {strategy.name!r} needs all devices of a round to begin with the same version; "
            f"these work asynchronously: {', '.join(able)}"
        )
    return ""
