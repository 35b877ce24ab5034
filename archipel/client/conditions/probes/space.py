"""The probes of free memory and free disk."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from archipel.client.conditions.probes.readings import Bytes, check_number, need_linux, read_text, read_whole
from archipel.errors import ClientError


@dataclass(frozen=True)
class Memory:
    """Holds while at least `min_free_memory` bytes are available without swapping, both on the machine and within the
    limits of this process's control groups (cgroup v2), as in a container."""

    min_free_memory: int
    root: Path = Path("/")
    name: ClassVar[str] = "memory"

    def __post_init__(self) -> None:
        need_linux("min_free_memory")
        check_number("min_free_memory", self.min_free_memory, Bytes, "bytes")

    def why_not(self) -> str:
        free = int(self.value())
        if free >= self.min_free_memory:
            return ""
        return f"{free} bytes of memory are free, below {self.min_free_memory} (setting min_free_memory)"

    def value(self) -> float:
        """The available memory in bytes."""
        path = self.root / "proc/meminfo"
        match = re.search(r"^MemAvailable: +(\d{1,15}) kB$", read_text(path), re.MULTILINE)
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
        check_number("min_free_disk", self.min_free_disk, Bytes, "bytes")

    def why_not(self) -> str:
        free = int(self.value())
        if free >= self.min_free_disk:
            return ""
        return f"{free} bytes of disk are free, below {self.min_free_disk} (setting min_free_disk)"

    def value(self) -> float:
        """The free bytes of the disk."""
        try:
            return float(shutil.disk_usage(self.folder).free)
        except OSError as error:
            raise ClientError(f"{self.folder} cannot be read ({error.strerror})") from None


def _left_to_groups(root: Path) -> list[int]:
    """The bytes that this process's control group and its ancestors may still take, for each that has a limit."""
    mount = root / "sys/fs/cgroup"
    membership = root / "proc/self/cgroup"
    if not (mount / "cgroup.controllers").exists() or not membership.exists():
        return []
    own = re.search(r"^0::/(.*)$", read_text(membership), re.MULTILINE)
    # A path with ".." is outside of what a container sees; the limits at the mount are then the ones that hold.
    parts = () if own is None or ".." in own[1].split("/") else tuple(filter(None, own[1].split("/")))
    # Every ancestor's limit holds too, so the caller takes the smallest.
    left = []
    for depth in range(len(parts) + 1):
        group = mount.joinpath(*parts[:depth])
        limit = group / "memory.max"  # the root group has none
        if limit.exists() and read_text(limit) != "max":
            left.append(
                max(0, read_whole(limit) - read_whole(group / "memory.current") + _reclaimable(group / "memory.stat"))
            )
    return left


def _reclaimable(path: Path) -> int:
    """Bytes of the page cache: they count as used, and the kernel frees them before it denies memory."""
    match = re.search(r"^inactive_file (\d{1,19})$", read_text(path), re.MULTILINE)
    if match is None:
        raise ClientError(f"{path} does not say what is in inactive_file")
    return int(match[1])
