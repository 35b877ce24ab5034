"""Which devices of a simulation attack, and how."""

from __future__ import annotations

import msgspec
import numpy as np

from archipel.errors import SimulationError
from archipel.permutations import permuted
from archipel.simulation.attacks.data import DATA_ATTACKS
from archipel.simulation.attacks.updates import ATTACKS

_PHASE = 0x61747461
"""Another permutation than those of cohorts and of devices' examples."""


class Attack(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An attack.

    Arguments:
        name: "", a name in ATTACKS (over updates) or in DATA_ATTACKS.
        share: of the population that attacks, 0 to below 1, drawn by the run's seed.
        clients: who attacks, by number, in place of a share.
        strength: of an attack over updates; None: its default.

    Raises SimulationError for a name that there is not, and for attackers without an attack.

    Example:
        Attack(name="sign-flip", share=0.2)
    """

    name: str = ""
    share: float = 0.0
    clients: tuple[int, ...] = ()
    strength: float | None = None

    def __post_init__(self) -> None:
        if self.name and self.name not in ATTACKS and self.name not in DATA_ATTACKS:
            known = ", ".join(sorted([*ATTACKS, *DATA_ATTACKS]))
            raise SimulationError(f"attack: there is no {self.name!r}; there are: {known}")
        if not 0 <= self.share < 1:
            raise SimulationError(f"attackers: {self.share} is not from 0 to below 1")
        if bool(self.name) != bool(self.share or self.clients):
            raise SimulationError("attack: give both, an attack and its attackers (a share, or clients by number)")

    @property
    def over_updates(self) -> bool:
        """Whether attackers see honest updates, so that the simulation keeps these."""
        return self.name in ATTACKS


def draw_attackers(attack: Attack, population: int, seed: int) -> frozenset[int]:
    """The clients that attack, in every round that they are drawn for: at least one.

    Raises SimulationError for a client that there is not.
    """
    if not attack.name:
        return frozenset()
    if attack.clients:
        unknown = [client for client in attack.clients if not 0 <= client < population]
        if unknown:
            raise SimulationError(f"attackers: there is no client {unknown[0]}; there are 0 to {population - 1}")
        return frozenset(attack.clients)
    count = min(max(1, round(attack.share * population)), population)
    return frozenset(permuted(np.arange(count), population, seed, _PHASE, 0).tolist())
