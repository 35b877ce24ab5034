"""What people see of devices, populations and enrolment tokens. What devices tell about themselves is not shown."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from archipel.protocol.messages import DeviceId, Key, Message, Name, RoundId
from archipel.protocol.sealed import Sealed
from archipel.server.resources import MAX_PAGE, PageQuery

DeviceState = Literal["active", "revoked"]
PAGE = 50


class DeviceQuery(PageQuery, frozen=True, kw_only=True):
    """Those of one population, in one state, or of all."""

    population: Name | None = None
    state: DeviceState | None = None


class DeviceInfo(Message, frozen=True, kw_only=True, omit_defaults=False):
    """`last_seen`: when it last came and waited for work, null before the first time. `rotations`: how often it
    replaced its key. `rounds`: how many it was assigned to."""

    device_id: DeviceId
    population: Name
    kind: Literal["device", "aggregator"]
    state: DeviceState
    enrolled: float
    last_seen: float | None
    revoked: float | None
    rotations: int
    rounds: int


class DevicePage(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Newest first; `next` is the `after` of the next page, null on the last."""

    items: list[DeviceInfo]
    next: DeviceId | None


class PopulationQuery(Message, frozen=True, kw_only=True):
    """At most `limit` populations, those that follow the one named `after`."""

    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = PAGE
    after: Name | None = None


class PopulationInfo(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Numbers of devices: `enrolled` and not revoked, `revoked`, `waiting` for work now, `in_rounds`. `live_tasks`:
    tasks that are running or paused."""

    name: Name
    enrolled: int
    revoked: int
    waiting: int
    in_rounds: int
    live_tasks: int


class PopulationPage(Message, frozen=True, kw_only=True, omit_defaults=False):
    """By name; `next` is the `after` of the next page, null on the last."""

    items: list[PopulationInfo]
    next: Name | None


class TokenRevocation(Message, frozen=True, kw_only=True):
    """The enrolment token to refuse from now on: its `certificate`, or its public key alone."""

    certificate: Sealed | None = None
    token_key: Key | None = None


class RevokedTokenInfo(Message, frozen=True, kw_only=True, omit_defaults=False):
    """`population` is null where only the token's public key was given."""

    token_id: RoundId
    token_key: Key
    population: Name | None
    revoked: float


class RevokedTokenPage(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Newest first; `next` is the `after` of the next page, null on the last."""

    items: list[RevokedTokenInfo]
    next: RoundId | None
