"""The owner's conditions for work, from probes that each look at one thing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from archipel.client.conditions.probes.device import Battery, Charging, Hours, Idle, Temperature
from archipel.client.conditions.probes.network import METERED_INTERFACES, Unmetered
from archipel.client.conditions.probes.readings import Bytes, Celsius, Load, Percent
from archipel.client.conditions.probes.space import Disk, Memory
from archipel.errors import ClientError
from archipel.protocol import written

_LONGEST_REASON = 300


class Probe(Protocol):
    """One condition. What it cannot tell it raises, as any exception: then it does not hold."""

    @property
    def name(self) -> str:
        """One word, which no other probe of the device has."""

    def why_not(self) -> str:
        """Empty while the condition holds, else one line for the owner. Takes milliseconds: it is asked often."""

    def value(self) -> str | float | bool:
        """What it measures now: for the owner, or an attribute that the owner chooses to tell."""


class Conditions:
    """All of `probes`, asked in their order; give it to `Agent(conditions=...)`."""

    def __init__(self, probes: Sequence[Probe]) -> None:
        """Raises ClientError when two have one name."""
        self.probes = tuple(probes)
        names = [probe.name for probe in self.probes]
        for name in names:
            if names.count(name) > 1:
                raise ClientError(f"two conditions are called {name!r}; give each probe a name of its own")

    def __call__(self) -> str:
        return self.why_not()

    def why_not(self) -> str:
        """Empty when all hold, else why the first that does not does not. Raises nothing."""
        for probe in self.probes:
            reason = _why_not(probe)
            if reason:
                return reason
        return ""

    def reasons(self) -> dict[str, str]:
        """What each says, by its name: empty where it holds."""
        return {probe.name: _why_not(probe) for probe in self.probes}

    def values(self) -> dict[str, str | float | bool]:
        """What the probes measure now, by their names; without those that cannot tell."""
        values = {}
        for probe in self.probes:
            try:
                value = probe.value()
            except Exception:  # noqa: BLE001, S112  (why_not says so)
                continue
            if isinstance(value, str | float | bool | int):
                values[probe.name] = value
        return values


class ConditionSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the device may work; by default always. Raises ClientError for a setting that cannot be, or not here."""

    charging: bool = False
    """Only on power (`Charging`)."""
    min_battery: Percent | None = None
    """Only with so many per cent in the battery."""
    idle: Load | None = None
    """Only while the machine's load for each core, without the agent's own, is below this (`Idle`)."""
    unmetered: bool = False
    """Only while the default route leads to an interface that is not metered (`Unmetered`)."""
    metered_interfaces: tuple[str, ...] = METERED_INTERFACES
    """Patterns of the names of those that are."""
    hours: tuple[str, ...] = ()
    """Only in one of these windows of local time, such as "22:00-06:00"."""
    max_temperature: Celsius | None = None
    """Only up to so many degrees Celsius in the hottest thermal zone."""
    min_free_memory: Bytes | None = None
    """Only with so many bytes of memory left."""
    min_free_disk: Bytes | None = None
    """Only with so many bytes left on the disk of the agent's folder."""

    def __post_init__(self) -> None:
        # The probes say more of what is wrong with what they are made of; the types speak for the rest.
        self.conditions(Path())
        try:
            written.conform(self)
        except ValueError as error:
            raise ClientError(str(error)) from None

    def conditions(self, folder: Path) -> Conditions:
        """`folder` is the agent's."""
        probes: list[Probe] = []
        # Those that only the clock or one small file is needed for come first.
        if self.hours:
            probes.append(Hours(self.hours))
        if self.charging:
            probes.append(Charging())
        if self.min_battery is not None:
            probes.append(Battery(self.min_battery))
        if self.unmetered:
            probes.append(Unmetered(self.metered_interfaces))
        if self.min_free_disk is not None:
            probes.append(Disk(self.min_free_disk, folder))
        if self.min_free_memory is not None:
            probes.append(Memory(self.min_free_memory))
        if self.idle is not None:
            probes.append(Idle(self.idle))
        if self.max_temperature is not None:
            probes.append(Temperature(self.max_temperature))
        return Conditions(probes)


def _why_not(probe: Probe) -> str:
    try:
        reason = probe.why_not()
    except Exception as error:  # noqa: BLE001  (a probe may be anybody's)
        kind = "" if isinstance(error, ClientError) else f"{type(error).__name__}: "
        reason = f"the condition {probe.name!r} cannot be told: {kind}{error}"
    else:
        if reason == "":
            return ""
        if not isinstance(reason, str) or not reason.strip():
            reason = f"the condition {probe.name!r} answers {reason!r}, expected a text"
    return " ".join(reason.split())[:_LONGEST_REASON]
