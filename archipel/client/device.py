"""The opened folder of a device, which all parts of an agent share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from archipel.bundle import Bundle
from archipel.client.conditions.gate import Gate
from archipel.client.config import AgentConfig
from archipel.client.connection.identity import DeviceRecord, IdentityStore
from archipel.client.connection.session import DeviceSession
from archipel.client.downloads.cache import Cache
from archipel.client.downloads.origins import Origins
from archipel.client.events import EventName
from archipel.client.memory.decisions import DecisionBook
from archipel.client.memory.journal import Journal
from archipel.client.memory.query_book import QueryBook
from archipel.client.memory.seeds import RoundSeeds
from archipel.client.memory.vault import Vault
from archipel.lite_runtime import DeviceState
from archipel.protocol.messages import RoundPlan
from archipel.protocol.sealed import Sealed
from archipel.protocol.vector import Vector

if TYPE_CHECKING:
    from archipel.lite_runtime.isolated.starter import Starter

Examples = Callable[[], Mapping[str, np.ndarray]]
"""The local data: `{field: array [examples, ...]}`."""


@dataclass(frozen=True)
class SiteRound:
    """A round among edge servers that this one takes part in: verified, but for the weights' bytes in the cache.

    `of_log` is the edge's record with the server that keeps the bundle's weights log. `check` raises
    RoundAbandonedError when the edge must leave the round.
    """

    plan: RoundPlan
    sealed: Sealed
    bundle: Bundle
    of_log: DeviceRecord
    cache: Cache
    session: DeviceSession
    check: Callable[[], None]


class Site(Protocol):
    """What an edge server contributes in place of an update of its own: the sum of a round of its devices."""

    def collect(self, given: SiteRound) -> tuple[Vector, int]:
        """The vector to mask (protocol.sites.site_vector), and how many devices' updates it is the sum of.

        The same for the same round, however often it is asked for. Raises ProtocolError where there is none,
        RoundAbandonedError.
        """
        ...

    def reconcile(self, journal: Journal) -> None:
        """Called between rounds, and after a restart, with the journal that says how they ended."""
        ...

    def follow(self, session: DeviceSession) -> None:
        """Called before each check-in. Raises what the session raises."""
        ...


class Emit(Protocol):
    """Reports an event to the program that embeds the agent."""

    def __call__(self, name: EventName, detail: Mapping[str, str | float], round_id: str = "") -> None: ...


@dataclass(frozen=True)
class Device:
    """One device's opened folder. `state_folder` holds the device's sealed state, in one file for each model. `site` is
    there in an edge server, which takes part in rounds among edge servers only."""

    config: AgentConfig
    identity: IdentityStore
    journal: Journal
    cache: Cache
    origins: Origins
    vault: Vault
    seeds: RoundSeeds
    gate: Gate
    examples: Examples
    emit: Emit
    state_folder: Path
    queries: QueryBook
    decisions: DecisionBook
    starter: Starter | None = None
    """Forks the processes of isolated rounds; None: each of them starts anew, or they are not isolated."""
    site: Site | None = None

    def state(self, name: str) -> DeviceState:
        """The state in the file `name`; an empty state if there is no file. Raises ClientError, TensorLayoutError."""
        data = self.vault.read(self.state_folder / name)
        return DeviceState() if data is None else DeviceState.decode(data)

    def close(self) -> None:
        """End the starter's process."""
        if self.starter is not None:
            self.starter.close()


def make_starter(config: AgentConfig) -> Starter | None:
    """The starter that the settings ask for. It starts no process before the first round."""
    if not config.isolated or not config.starter_seconds:
        return None
    from archipel.lite_runtime.isolated.starter import Starter

    return Starter(config.starter_seconds)
