"""What arbitrary devices do, for tests and simulations of robust aggregation."""

from archipel.simulation.attacks.data import DATA_ATTACKS, patch
from archipel.simulation.attacks.settings import Attack, draw_attackers
from archipel.simulation.attacks.spoiling import spoil_clients
from archipel.simulation.attacks.updates import ATTACKS, UpdateAttack

__all__ = ["ATTACKS", "DATA_ATTACKS", "Attack", "UpdateAttack", "draw_attackers", "patch", "spoil_clients"]
