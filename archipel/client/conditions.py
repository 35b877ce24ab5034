"""TEMPORARY: stands in for the conditions until they are merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from archipel.errors import ClientError


class Probe(Protocol):
    name: str

    def why_not(self) -> str: ...

    def value(self) -> str | float | bool: ...


class _Disk:
    name = "disk"

    def __init__(self, folder: Path, least: int) -> None:
        self._folder, self._least = folder, least

    def value(self) -> float:
        import shutil

        return float(shutil.disk_usage(self._folder).free)

    def why_not(self) -> str:
        return "" if self.value() >= self._least else f"less than {self._least} bytes free"


class Conditions:
    def __init__(self, probes: Sequence[Probe]) -> None:
        self.probes = list(probes)

    def why_not(self) -> str:
        return next((reason for probe in self.probes if (reason := probe.why_not())), "")

    def values(self) -> dict[str, str | float | bool]:
        return {probe.name: probe.value() for probe in self.probes}

    def __call__(self) -> str:
        return self.why_not()


@dataclass(frozen=True, kw_only=True)
class ConditionSettings:
    charging: bool = False
    min_battery: float = 0.0
    idle: float = 0.0
    unmetered: bool = False
    metered_interfaces: Sequence[str] = ()
    hours: Sequence[str] = ()
    max_temperature: float = 0.0
    min_free_memory: int = 0
    min_free_disk: int = 0

    def __post_init__(self) -> None:
        if self.min_free_disk < 0:
            raise ClientError(f"min_free_disk must not be negative, is {self.min_free_disk}")

    def conditions(self, folder: Path) -> Conditions:
        return Conditions([_Disk(folder, self.min_free_disk)] if self.min_free_disk else [])
