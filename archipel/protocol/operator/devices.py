"""What people see of devices, populations and enrolment tokens. Attributes that devices report are not shown."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from archipel.protocol.messages import DeviceId, Key, Message, Name, RoundId
from archipel.protocol.operator.tasks import MAX_PAGE, PageQuery
from archipel.protocol.sealed import Sealed

DeviceState = Literal["active", "set-aside", "revoked"]
"""The states of a query: `active` are all devices that were not revoked, including those that are set aside."""
PAGE = 50


class DeviceQuery(PageQuery, frozen=True, kw_only=True):
    """Devices of one population (null: of all), in one state (null: in any)."""

    population: Name | None = None
    state: DeviceState | None = None


class QuarantineInfo(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Why no round takes a device from `since` until `until`. `detail` is the evidence in words, `round_id` the round
    whose end showed it, `times` how often the server has set the device aside, this time included. Times are in Unix
    seconds.

    Example: see `archipel.operator.DeviceInfo`.
    """

    reason: str
    detail: str
    round_id: RoundId
    since: float
    until: float
    times: int


class SuspicionInfo(Message, frozen=True, kw_only=True, omit_defaults=False):
    """What the search for devices that spoil rounds knows of a device: it was in `rounds` rounds since the search
    began, of which `spoiled` were spoiled. `odds`: at most one in so many searches finds such evidence against an
    honest device.

    Example: see `archipel.operator.DeviceInfo`.
    """

    rounds: int
    spoiled: int
    odds: float


class DeviceInfo(Message, frozen=True, kw_only=True, omit_defaults=False):
    """`last_seen`: when the device last waited for work, null before the first time. `rotations`: how often it
    replaced its key. `rounds`: how many it was assigned to. `faults`: how often it did something wrong that was
    clearly its own fault. `quarantine` is null for a device that rounds may take, `suspicion` for one that was in no
    spoiled round lately. Times are in Unix seconds.

    Example:
        device = client.devices.get(device_id)
        print(device.state, device.rounds, "rounds,", device.faults, "faults")  # active 3 rounds, 0 faults
        if device.quarantine is not None:
            print(device.quarantine.reason, "until", device.quarantine.until)
        if device.suspicion is not None:
            print(device.suspicion.spoiled, "of", device.suspicion.rounds, "rounds were spoiled")
    """

    device_id: DeviceId
    population: Name
    kind: Literal["device", "aggregator"]
    state: DeviceState
    enrolled: float
    last_seen: float | None
    revoked: float | None
    rotations: int
    rounds: int
    faults: int
    quarantine: QuarantineInfo | None
    suspicion: SuspicionInfo | None


class DevicePage(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Newest first; `next` is the `after` of the next page, null on the last."""

    items: list[DeviceInfo]
    next: DeviceId | None


class PopulationQuery(Message, frozen=True, kw_only=True):
    """At most `limit` populations, from the one that follows `after` by name."""

    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = PAGE
    after: Name | None = None


class SearchInfo(Message, frozen=True, kw_only=True, omit_defaults=False):
    """A search for devices that spoil a population's rounds. It has learned from `rounds` rounds since `began`, of
    which `spoiled` were spoiled; the last `quiet` were good. `suspects` devices were in a spoiled round; the server
    mixes them with other devices. Times are in Unix seconds.

    Example: see `archipel.operator.PopulationInfo`.
    """

    began: float
    last_spoiled: float
    rounds: int
    spoiled: int
    quiet: int
    suspects: int


class PopulationInfo(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Numbers of devices: `enrolled` and not revoked, `revoked`, `waiting` for work now, `in_rounds`, `set_aside` (no
    round takes them now). `live_tasks` counts tasks that run or are paused. `search` is null while no round is
    spoiled.

    Example:
        for each in client.populations.list():
            print(each.name, each.enrolled, "devices,", each.set_aside, "set aside")  # pupils 3 devices, 0 set aside
            if each.search is not None:
                print(each.search.suspects, "devices were in a spoiled round")
    """

    name: Name
    enrolled: int
    revoked: int
    waiting: int
    in_rounds: int
    set_aside: int
    live_tasks: int
    search: SearchInfo | None


class PopulationPage(Message, frozen=True, kw_only=True, omit_defaults=False):
    """By name; `next` is the `after` of the next page, null on the last."""

    items: list[PopulationInfo]
    next: Name | None


class TokenRevocation(Message, frozen=True, kw_only=True):
    """The enrolment token to refuse from now on: its `certificate`, or its public key alone."""

    certificate: Sealed | None = None
    token_key: Key | None = None


class RevokedTokenInfo(Message, frozen=True, kw_only=True, omit_defaults=False):
    """`population` is null where only the token's public key was given; `revoked` is in Unix seconds.

    Example:
        revoked = client.enrolment_tokens.revoke(token_key=bytes(32))
        print(revoked.token_id, revoked.revoked)
    """

    token_id: RoundId
    token_key: Key
    population: Name | None
    revoked: float


class RevokedTokenPage(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Newest first; `next` is the `after` of the next page, null on the last."""

    items: list[RevokedTokenInfo]
    next: RoundId | None
