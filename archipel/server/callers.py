"""The identity of a request's caller: role, id, and the populations that its token is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from archipel.errors import ForbiddenError

if TYPE_CHECKING:
    # The supervisor reads settings, which name roles, and has no database.
    from sqlalchemy import ColumnElement
    from sqlalchemy.orm import InstrumentedAttribute

Role = Literal["anyone", "device", "operator", "analyst", "auditor", "admin"]
"""Operators train and roll out models, analysts run evaluations and analyses, auditors read everything. Admins may do
all that, and make and revoke tokens."""


@dataclass(frozen=True)
class Identity:
    """`id` is the device's or token's id, "root" for the token in the settings. `populations`: None means all."""

    role: Role
    id: str = ""
    populations: frozenset[str] | None = None

    @property
    def device_id(self) -> str:
        """Empty unless the role is `device`."""
        return self.id if self.role == "device" else ""

    @property
    def actor(self) -> str:
        """The caller's name in the audit log."""
        return f"{self.role}:{self.id}"

    def may(self, population: str) -> bool:
        """Whether the token is for that population. To the caller, objects of others must seem not to exist."""
        return self.populations is None or population in self.populations

    def visible(self, population: ColumnElement[Any] | InstrumentedAttribute[Any]) -> list[ColumnElement[bool]]:
        """Conditions for a query that leave only rows whose `population` the token is for."""
        return [] if self.populations is None else [population.in_(self.populations)]

    def require(self, population: str) -> None:
        """Raise ForbiddenError unless the token is for the population, which the caller itself has named."""
        if not self.may(population):
            raise ForbiddenError(f"this token is not for population {population!r}")

    def require_all(self) -> None:
        """Raise ForbiddenError unless the token is for all populations."""
        if self.populations is not None:
            raise ForbiddenError("this needs a token that is for all populations")


ANYONE = Identity("anyone")
ROOT = Identity("admin", "root")
