"""How much of the machine's load average this process and its children cause."""

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
    """The number of cores that this process and its children keep busy, averaged over the last minute.

    The average is that of the kernel's load: an exponential one, with samples at least 5 seconds apart. Call it often
    while there is work. `cpu` gives the CPU seconds used so far, `clock` seconds.
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
            # As in the kernel (kernel/sched/loadavg.c): after one minute a sample counts 1/e of its value. If a child
            # ends that nobody waits for, the sum of CPU times falls; that counts as none.
            decay = math.exp(-passed / _MINUTE)
            self._load = self._load * decay + max(0.0, used - used_then) / passed * (1 - decay)
            self._before = (now, used)
        return self._load


def own_cpu_seconds() -> float:
    """CPU time of this process and its children, running and ended, in seconds."""
    # `os.times` has the children that have ended; those that still run are in /proc.
    times = os.times()
    total = times.user + times.system + times.children_user + times.children_system
    own = str(os.getpid())
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and process.name != own:
            try:
                # The name, field 2, is in brackets and may contain spaces and brackets; count from behind it.
                fields = (process / "stat").read_bytes().rpartition(b")")[2].split()
            except OSError:  # it has ended
                continue
            if fields[1].decode() == own:  # ppid; below utime and stime, in clock ticks
                total += (int(fields[11]) + int(fields[12])) / _TICKS
    return total
