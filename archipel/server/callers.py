"""Whoever makes a request: a role, an id, and the populations that it is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from archipel.errors import ForbiddenError

Role = Literal["anyone", "device", "operator", "analyst", "auditor", "admin"]
"""Operators have models trained, analysts ask devices questions (evaluations and analyses), auditors read everything,
admins may do all that, and make and revoke tokens."""


@dataclass(frozen=True)
class Identity:
    """`id` is the device's or the token's, "root" for the token in the settings. `populations`: None is all of them."""

    role: Role
    id: str = ""
    populations: frozenset[str] | None = None

    @property
    def device_id(self) -> str:
        """Empty unless the role is `device`."""
        return self.id if self.role == "device" else ""

    @property
    def actor(self) -> str:
        """As the audit log names it."""
        return f"{self.role}:{self.id}"

    def may(self, population: str) -> bool:
        """Whether the token is for that population. What is of another one is to the caller as if it were not there."""
        return self.populations is None or population in self.populations

    def require(self, population: str) -> None:
        """Raises ForbiddenError where the token is not for the population, which the caller has named."""
        if not self.may(population):
            raise ForbiddenError(f"this token is not for population {population!r}")

    def require_all(self) -> None:
        """Raises ForbiddenError where the token is for some populations only."""
        if self.populations is not None:
            raise ForbiddenError("this needs a token that is for all populations")


ANYONE = Identity("anyone")
ROOT = Identity("admin", "root")
