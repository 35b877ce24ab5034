"""Probes of the device itself: its power supply, its temperature, how busy it is, the time of day.

`root` is the folder that contains proc and sys.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, tzinfo
from pathlib import Path
from typing import ClassVar

from archipel.client.conditions.probes.own_load import OwnLoad
from archipel.client.conditions.probes.readings import (
    Celsius,
    Load,
    Percent,
    check_number,
    list_folders,
    need_linux,
    read_text,
    read_whole,
)
from archipel.errors import ClientError

_BATTERIES = {"Battery", "UPS"}
_STATUS = {"Unknown", "Charging", "Discharging", "Not charging", "Full"}


@dataclass(frozen=True)
class Charging:
    """Holds on mains or USB power, and while a battery charges or is full. It does not hold while a battery discharges,
    even on a charger that is too weak. A device without a battery is always on power."""

    root: Path = Path("/")
    name: ClassVar[str] = "charging"

    def __post_init__(self) -> None:
        need_linux("charging")

    def why_not(self) -> str:
        return "" if self.value() else "not charging (setting charging)"

    def value(self) -> bool:
        batteries, others = _supplies(self.root)
        status = {_status(battery) for battery in batteries}
        # Before the supplies: a charger that is too weak is online while the battery discharges.
        if "Discharging" in status:
            return False
        return not batteries or bool(status & {"Charging", "Full"}) or any(map(_is_online, others))


@dataclass(frozen=True)
class Battery:
    """Holds while the battery (the mean of several) has at least `min_battery` per cent; always without a battery."""

    min_battery: float
    root: Path = Path("/")
    name: ClassVar[str] = "battery"

    def __post_init__(self) -> None:
        need_linux("min_battery")
        check_number("min_battery", self.min_battery, Percent, "per cent")

    def why_not(self) -> str:
        level = self._level()
        if level is None or level >= self.min_battery:
            return ""
        return f"the battery is at {level:g} per cent, below {self.min_battery:g} (setting min_battery)"

    def value(self) -> float:
        """The level in per cent. Raises ClientError without a battery."""
        level = self._level()
        if level is None:
            raise ClientError("there is no battery")
        return level

    def _level(self) -> float | None:
        levels = []
        for battery in _supplies(self.root)[0]:
            levels.append(read_whole(battery / "capacity"))
            if not 0 <= levels[-1] <= 100:
                raise ClientError(f"{battery / 'capacity'} has {levels[-1]} where per cent are expected")
        return sum(levels) / len(levels) if levels else None


@dataclass(frozen=True)
class Idle:
    """Holds while the load of the last minute, for each core of the machine, is below `idle`.

    The load is the average number of threads that run, wait to run, or wait for a disk. The part that this process and
    its children cause does not count, so that the agent's own work does not stop it.
    """

    idle: float
    root: Path = Path("/")
    own: Callable[[], float] = field(default_factory=OwnLoad, compare=False, repr=False)
    name: ClassVar[str] = "idle"

    def __post_init__(self) -> None:
        need_linux("idle")
        check_number("idle", self.idle, Load, "busy threads for each core")

    def why_not(self) -> str:
        load = self.value()
        return (
            ""
            if load < self.idle
            else f"busy: {load:.2f} threads for each core, not below {self.idle:g} (setting idle)"
        )

    def value(self) -> float:
        path = self.root / "proc/loadavg"
        loads = read_text(path)
        if not re.fullmatch(r"\d{1,6}\.\d\d( \d{1,6}\.\d\d){2} \d+/\d+ \d+", loads):
            raise ClientError(f"{path} has {loads[:40]!r} where loads are expected")
        # The two are averaged alike but sampled at other moments, so the difference can be a little below 0.
        return max(0.0, float(loads.split()[0]) - self.own()) / _cores(self.root)


@dataclass(frozen=True)
class Temperature:
    """Holds while the hottest thermal zone has at most `max_temperature` degrees Celsius; always if no zone can be
    read."""

    max_temperature: float
    root: Path = Path("/")
    name: ClassVar[str] = "temperature"

    def __post_init__(self) -> None:
        need_linux("max_temperature")
        check_number("max_temperature", self.max_temperature, Celsius, "degrees Celsius")

    def why_not(self) -> str:
        hottest = self._hottest()
        if hottest is None or hottest <= self.max_temperature:
            return ""
        return f"too hot: {hottest:g} degrees Celsius, allowed are {self.max_temperature:g} (setting max_temperature)"

    def value(self) -> float:
        """The hottest zone in degrees Celsius. Raises ClientError if no zone can be read."""
        hottest = self._hottest()
        if hottest is None:
            raise ClientError("no thermal zone can be read")
        return hottest

    def _hottest(self) -> float | None:
        zones = []
        for zone in list_folders(self.root / "sys/class/thermal", "thermal_zone*"):
            try:
                reading = (zone / "temp").read_bytes()
            except OSError:  # a sensor that is switched off
                continue
            # The kernel reports thousandths of a degree.
            zones.append(read_whole(zone / "temp", reading.decode("ascii", "replace").strip()) / 1000)
        return max(zones, default=None)


@dataclass(frozen=True)
class Hours:
    """Holds within windows of the local time such as "22:00-06:00": from the first time on, until before the second.

    It uses the clock on the wall: when daylight saving time ends, one hour comes twice. `timezone` None is the
    device's own.
    """

    hours: tuple[str, ...]
    clock: Callable[[], float] = time.time
    timezone: tzinfo | None = None
    name: ClassVar[str] = "hours"

    def __post_init__(self) -> None:
        if isinstance(self.hours, str) or not self.hours:
            raise ClientError(f'hours must be a list of windows such as ["22:00-06:00"], is {self.hours!r}')
        for window in self.hours:
            _minutes(window)

    def why_not(self) -> str:
        now = self.value()
        minute = _minute(now)
        for window in self.hours:
            first, last = _minutes(window)
            # A window whose end is before its start goes over midnight: then either side of it is inside.
            if first <= minute < last if first < last else minute >= first or minute < last:
                return ""
        return f"it is {now}, hours for work are {', '.join(self.hours)} (setting hours)"

    def value(self) -> str:
        """The local time, such as 23:15."""
        return datetime.fromtimestamp(self.clock(), self.timezone).strftime("%H:%M")


def _supplies(root: Path) -> tuple[list[Path], list[Path]]:
    """The device's batteries and its other supplies."""
    batteries: list[Path] = []
    others: list[Path] = []
    for supply in list_folders(root / "sys/class/power_supply"):
        # The scope "Device" marks the battery of a mouse and the like; an empty battery bay has "present" 0.
        if _text_or_empty(supply / "scope") == "Device" or _text_or_empty(supply / "present") == "0":
            continue
        (batteries if read_text(supply / "type") in _BATTERIES else others).append(supply)
    return batteries, others


def _status(battery: Path) -> str:
    status = read_text(battery / "status")
    if status not in _STATUS:
        raise ClientError(
            f"{battery / 'status'} has {status[:40]!r} where one of {', '.join(sorted(_STATUS))} is expected"
        )
    return status


def _is_online(supply: Path) -> bool:
    path = supply / "online"
    return path.exists() and read_whole(path) > 0


def _text_or_empty(path: Path) -> str:
    return read_text(path) if path.exists() else ""


def _cores(root: Path) -> int:
    path = root / "sys/devices/system/cpu/online"
    cores = read_text(path)
    count = 0
    for part in cores.split(","):
        span = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part)
        if span is None or int(span[2] or span[1]) < int(span[1]):
            raise ClientError(f"{path} has {cores[:40]!r} where cores are expected")
        count += int(span[2] or span[1]) - int(span[1]) + 1
    return count


def _minutes(window: object) -> tuple[int, int]:
    """The window's first minute of the day, and the minute after its last one."""
    match = re.fullmatch(r"((?:[01]\d|2[0-3]):[0-5]\d)-((?:[01]\d|2[0-3]):[0-5]\d|24:00)", str(window), re.ASCII)
    if not match or match[1] == match[2]:
        raise ClientError(f'hours must be windows such as "22:00-06:00" or "00:00-24:00", one is {window!r}')
    return _minute(match[1]), _minute(match[2])


def _minute(moment: str) -> int:
    return int(moment[:2]) * 60 + int(moment[3:])
