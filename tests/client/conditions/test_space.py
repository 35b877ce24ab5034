"""Free memory, of the machine and of control groups, and free disk."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from archipel.client.conditions.probes.space import Disk, Memory
from archipel.errors import ClientError

Tree = Callable[..., Path]
MIB = 1 << 20
MEMINFO = {"proc/meminfo": f"MemTotal:  8000000 kB\nMemFree:  100 kB\nMemAvailable:  {2048 << 10} kB\nBuffers:  5 kB"}


def group(path: str, limit: str, current: int, inactive: int = 0) -> dict[str, str]:
    folder = f"sys/fs/cgroup{path}"
    return {
        f"{folder}/memory.max": limit,
        f"{folder}/memory.current": str(current),
        f"{folder}/memory.stat": f"anon 5\nfile 900\nactive_file 7\ninactive_file {inactive}\nslab 3",
    }


def member(path: str) -> dict[str, str]:
    return {"proc/self/cgroup": f"1:name=systemd:/other\n0::{path}", "sys/fs/cgroup/cgroup.controllers": "cpu memory"}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 2048 * MIB),
        ({**member("/"), **group("", str(256 * MIB), 100 * MIB, 20 * MIB)}, 176 * MIB),  # a container's own view
        ({**member("/"), **group("", "max", 100 * MIB)}, 2048 * MIB),
        ({**member("/"), **group("", str(4096 * MIB), 0)}, 2048 * MIB),
        ({**member("/"), **group("", str(100 * MIB), 120 * MIB)}, 0),
        (member("/a.slice/b.service"), 2048 * MIB),
        (
            {**member("/a.slice/b.service"), **group("/a.slice", str(64 * MIB), MIB),
             **group("/a.slice/b.service", str(512 * MIB), 500 * MIB, 100 * MIB)},
            63 * MIB,
        ),
        ({**member("/../../host"), **group("", str(64 * MIB), MIB)}, 63 * MIB),
        # Version 1 has the process elsewhere, and no cgroup.controllers at the mount.
        ({"proc/self/cgroup": "4:memory:/x\n0::/", **group("", str(64 * MIB), MIB)}, 2048 * MIB),
    ],
)  # fmt: skip
def test_memory(tree: Tree, files: dict[str, str], free: int) -> None:
    root = tree({**MEMINFO, **files})
    assert Memory(1, root).value() == free
    assert Memory(max(free, 1), root).why_not() == ("" if free else "0 bytes of memory are free, below 1 (setting "
                                                    "min_free_memory)")  # fmt: skip
    assert Memory(free + 1, root).why_not() == (
        f"{free} bytes of memory are free, below {free + 1} (setting min_free_memory)"
    )


@pytest.mark.parametrize(
    "line", ["", "MemAvailable: 12 MB", "MemAvailable: -5 kB", "MemAvailable: 1e3 kB", "XMemAvailable: 12 kB"]
)
def test_a_kernel_that_does_not_say(tree: Tree, line: str) -> None:
    with pytest.raises(ClientError, match="meminfo does not say how much memory is available"):
        Memory(1, tree({"proc/meminfo": f"MemTotal: 5 kB\n{line}"})).why_not()


def test_memory_of_this_machine() -> None:
    here = Memory(1).value()
    assert here <= psutil.virtual_memory().available + 256 * MIB
    if not Path("/sys/fs/cgroup/cgroup.controllers").exists():
        assert abs(here - psutil.virtual_memory().available) < 512 * MIB
    assert Memory(1).why_not() == ""
    assert Memory(psutil.virtual_memory().total * 2).why_not()


def test_disk(tmp_path: Path) -> None:
    free = psutil.disk_usage(str(tmp_path)).free
    assert abs(Disk(1, tmp_path).value() - free) < 256 * MIB
    assert Disk(max(1, free // 2), tmp_path).why_not() == ""
    assert (
        Disk(free * 4, tmp_path).why_not().endswith(f"bytes of disk are free, below {free * 4} (setting min_free_disk)")
    )
    with pytest.raises(ClientError, match=r"nothing cannot be read \(No such file or directory\)"):
        Disk(1, tmp_path / "nothing").why_not()


@pytest.mark.parametrize("wrong", [0, -1, "1 GB", True, None, math.nan])
def test_what_is_no_number_of_bytes(wrong: object, tmp_path: Path) -> None:
    with pytest.raises(ClientError, match=f"min_free_memory must be a number of bytes above 0, is {wrong!r}"):
        Memory(wrong)  # type: ignore[arg-type]
    with pytest.raises(ClientError, match=f"min_free_disk must be a number of bytes above 0, is {wrong!r}"):
        Disk(wrong, tmp_path)  # type: ignore[arg-type]
