"""How much of the machine's load average is this process and its children."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

_MINUTE = 60.0
_SAMPLE_SECONDS = 5.0
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class OwnLoad:
    """Cores that this process and its children kept busy, averaged over the last minute as the kernel averages load.

    Ask it often while there is work. `cpu` gives the CPU seconds used so far, `clock` seconds.
    """

    def __init__(self, cpu: Callable[[], float] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._cpu = cpu or own_cpu_seconds
        self._clock = clock
        self._load = 0.0
        self._before: tuple[float, float] | None = None

    def __call__(self) -> float:
        now = self._clock()
        if self._before is None:
            self._before = (now, self._cpu())
        then, used_then = self._before
        passed = now - then
        if passed >= _SAMPLE_SECONDS:
            used = self._cpu()
            kept = math.exp(-passed / _MINUTE)
            self._load = self._load * kept + max(0.0, used - used_then) / passed * (1 - kept)
            self._before = (now, used)
        return self._load


def own_cpu_seconds() -> float:
    """CPU time of this process and its children, those that have ended too."""
    times = os.times()
    total = times.user + times.system + times.children_user + times.children_system
    own = str(os.getpid())
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and process.name != own:
            try:
                fields = (process / "stat").read_bytes().rpartition(b")")[2].split()
            except OSError:  # it has ended
                continue
            if fields[1].decode() == own:
                total += (int(fields[11]) + int(fields[12])) / _TICKS
    return total
