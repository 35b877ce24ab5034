"""When the coordinator applies the retention rule."""

from __future__ import annotations

from archipel.server.retention.deleting import BATCH, Write, delete_unneeded, remove_deleted
from archipel.server.retention.rules import Rule
from archipel.server.services import Services

EVERY_SECONDS = 3600.0


class Retention:
    """Looks every hour, and then in each step deletes one batch until nothing is left to delete."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._next = 0.0

    def step(self, write: Write) -> bool:
        """Do what is due. Returns whether there is more to do at once. `write` makes the coordinator's transactions."""
        services = self._services
        if services.clock() < self._next:
            return False
        deleted = delete_unneeded(services, write, Rule.of(services.settings), actor="coordinator")
        removed = remove_deleted(services, write)
        if deleted or removed == BATCH:
            return True
        self._next = services.clock() + EVERY_SECONDS
        return False
