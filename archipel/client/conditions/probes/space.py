"""How much memory and disk is free."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from archipel.client.conditions.probes.readings import Bytes, need_linux, number, text, whole
from archipel.errors import ClientError


@dataclass(frozen=True)
class Memory:
    """Holds while at least `min_free_memory` bytes can be had without swapping: by the machine, and by this process's
    control groups (cgroup v2), as in a container."""

    min_free_memory: int
    root: Path = Path("/")
    name: ClassVar[str] = "memory"

    def __post_init__(self) -> None:
        need_linux("min_free_memory")
        number("min_free_memory", self.min_free_memory, Bytes, "bytes")

    def why_not(self) -> str:
        free = int(self.value())
        if free >= self.min_free_memory:
            return ""
        return f"{free} bytes of memory are free, below {self.min_free_memory} (setting min_free_memory)"

    def value(self) -> float:
        """Bytes."""
        path = self.root / "proc/meminfo"
        match = re.search(r"^MemAvailable: +(\d{1,15}) kB$", text(path), re.MULTILINE)
        if match is None:
            raise ClientError(f"{path} does not say how much memory is available")
        return float(min([int(match[1]) << 10, *_left_to_groups(self.root)]))


@dataclass(frozen=True)
class Disk:
    """Holds while the file system of `folder` has at least `min_free_disk` bytes free for this user."""

    min_free_disk: int
    folder: Path
    name: ClassVar[str] = "disk"

    def __post_init__(self) -> None:
        number("min_free_disk", self.min_free_disk, Bytes, "bytes")

    def why_not(self) -> str:
        free = int(self.value())
        if free >= self.min_free_disk:
            return ""
        return f"{free} bytes of disk are free, below {self.min_free_disk} (setting min_free_disk)"

    def value(self) -> float:
        """Bytes."""
        try:
            return float(shutil.disk_usage(self.folder).free)
        except OSError as error:
            raise ClientError(f"{self.folder} cannot be read ({error.strerror})") from None


def _left_to_groups(root: Path) -> list[int]:
    """Bytes that this process's control group, and each that it is in, may still take: those that have a limit."""
    mount = root / "sys/fs/cgroup"
    membership = root / "proc/self/cgroup"
    if not (mount / "cgroup.controllers").exists() or not membership.exists():
        return []
    own = re.search(r"^0::/(.*)$", text(membership), re.MULTILINE)
    # Outside of what the container sees: then its limits are those at the mount.
    parts = () if own is None or ".." in own[1].split("/") else tuple(filter(None, own[1].split("/")))
    left = []
    for depth in range(len(parts) + 1):
        group = mount.joinpath(*parts[:depth])
        limit = group / "memory.max"  # the root group has none
        if limit.exists() and text(limit) != "max":
            left.append(max(0, whole(limit) - whole(group / "memory.current") + _reclaimable(group / "memory.stat")))
    return left


def _reclaimable(path: Path) -> int:
    """Bytes of files that were read and can be read again: they count as used and are given up first."""
    match = re.search(r"^inactive_file (\d{1,19})$", text(path), re.MULTILINE)
    if match is None:
        raise ClientError(f"{path} does not say what is in inactive_file")
    return int(match[1])
