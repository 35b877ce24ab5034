"""The owner's conditions for work; a probe for each looks at one thing of the device."""

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
    """One condition for work (docs/agent.md has an example). If a method cannot tell, it raises any exception, and the
    condition does not hold.

    Example:
        class Parked:
            name = "parked"

            def why_not(self):
                return "" if self.value() else "the car is moving"

            def value(self):
                return True

        print(Conditions([Parked()]).why_not() or "may work")  # may work
    """

    @property
    def name(self) -> str:
        """One word, different from the names of the device's other probes."""

    def why_not(self) -> str:
        """Empty while the condition holds, else the reason in one line for the owner.

        It should take milliseconds: the agent calls it up to four times a second.
        """

    def value(self) -> str | float | bool:
        """The present value, for the owner's view, or as an attribute that the owner chooses to report."""


class Conditions:
    """Holds while all of `probes` hold, which it asks in their order; the value for `Agent(conditions=...)`.

    Arguments:
        probes: the conditions. Each has a name of its own.

    Raises:
        ClientError: two probes have the same name.

    Example:
        conditions = ConditionSettings(charging=True, hours=("22:00-06:00",)).conditions(Path("device"))
        print(conditions.why_not() or "may work")
    """

    def __init__(self, probes: Sequence[Probe]) -> None:
        self.probes = tuple(probes)
        names = [probe.name for probe in self.probes]
        for name in names:
            if names.count(name) > 1:
                raise ClientError(f"two conditions are called {name!r}; give each probe a name of its own")

    def __call__(self) -> str:
        return self.why_not()

    def why_not(self) -> str:
        """Empty if all conditions hold, else the reason of the first one that does not. Raises nothing."""
        for probe in self.probes:
            reason = _why_not(probe)
            if reason:
                return reason
        return ""

    def reasons(self) -> dict[str, str]:
        """The reason of each condition by its name; empty if it holds."""
        return {probe.name: _why_not(probe) for probe in self.probes}

    def values(self) -> dict[str, str | float | bool]:
        """The present values of the probes by their names, without the probes that cannot measure."""
        values = {}
        for probe in self.probes:
            try:
                value = probe.value()
            except Exception:  # noqa: BLE001, S112  (`why_not` reports it)
                continue
            if isinstance(value, str | float | bool | int):
                values[probe.name] = value
        return values


class ConditionSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the device may work; by default always.

    Raises:
        ClientError: a setting is out of range, or this machine cannot measure it.

    Example:
        settings = ConditionSettings(charging=True, hours=("22:00-06:00",))
    """

    charging: bool = False
    """Work only on power (`Charging`)."""
    min_battery: Percent | None = None
    """Work only with at least this many per cent in the battery."""
    idle: Load | None = None
    """Work only while the machine's load for each core, without the agent's own, is below this (`Idle`)."""
    unmetered: bool = False
    """Work only while the default route leads to an interface that is not metered (`Unmetered`)."""
    metered_interfaces: tuple[str, ...] = METERED_INTERFACES
    """Patterns of the names of metered interfaces, as in a shell."""
    hours: tuple[str, ...] = ()
    """Work only in one of these windows of local time, such as "22:00-06:00"."""
    max_temperature: Celsius | None = None
    """Work only while the hottest thermal zone has at most this many degrees Celsius."""
    min_free_memory: Bytes | None = None
    """Work only with at least this many bytes of memory free."""
    min_free_disk: Bytes | None = None
    """Work only with at least this many bytes free on the disk of the agent's folder."""

    def __post_init__(self) -> None:
        # First the probes, whose errors explain their own settings; then the types of all other settings.
        self.conditions(Path())
        try:
            written.conform(self)
        except ValueError as error:
            raise ClientError(str(error)) from None

    def conditions(self, folder: Path) -> Conditions:
        """The probes of these settings. `folder` is the agent's, whose disk `min_free_disk` is about."""
        probes: list[Probe] = []
        # The cheap ones come first: `why_not` stops at the first condition that does not hold.
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
    # A condition that fails must not let the device work, so an error counts as a reason.
    except Exception as error:  # noqa: BLE001  (the program may pass probes of its own)
        kind = "" if isinstance(error, ClientError) else f"{type(error).__name__}: "
        reason = f"the condition {probe.name!r} cannot be checked: {kind}{error}"
    else:
        if reason == "":
            return ""
        # None or False from a probe of the program's own is a mistake: to take it for "holds" could break a limit.
        if not isinstance(reason, str) or not reason.strip():
            reason = f"the condition {probe.name!r} answers {reason!r}, expected a text"
    return " ".join(reason.split())[:_LONGEST_REASON]
