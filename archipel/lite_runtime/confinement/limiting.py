"""Limits of what a process may take: the memory that it adds, its CPU time, and how long it outlives its parent."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import sys

_END_WITH_PARENT = 1  # PR_SET_PDEATHSIG of linux/prctl.h


def limit_memory(allowance: int) -> None:
    """Let this process add at most `allowance` bytes of private writable memory to what it has now.

    RLIMIT_DATA counts the heap, anonymous mappings, private writable mappings of files and thread stacks, from when
    they are made writable, used or not (Linux 4.7 and later). Where there is no /proc, what it has now counts as none.
    """
    try:
        with open("/proc/self/status") as file:
            match = re.search(r"^VmData:\s+(\d+) kB", file.read(), re.MULTILINE)
    except FileNotFoundError:
        match = None
    used = int(match[1]) << 10 if match else 0
    resource.setrlimit(resource.RLIMIT_DATA, (used + allowance, used + allowance))


def limit_cpu(seconds: float) -> None:
    """Let SIGPROF end this process after `seconds` more seconds of CPU time of all its threads; 0: never.

    A timer and not RLIMIT_CPU: that limit counts whole seconds from the start of the process, so it cannot be set for
    one request.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)


def limit_work(parent: int, *, cpu_seconds: float, seconds: int, memory: int, file_bytes: int) -> None:
    """Bound a process that works once and then ends.

    Arguments:
        parent: the process id of its parent, with which it ends; on Linux with the thread of it that started it.
        cpu_seconds, seconds: CPU time of all its threads, and time by the clock.
        memory: bytes of private memory that it may add.
        file_bytes: the largest file that it may write.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_END_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        # The parent died before the request above, so no signal will come.
        os._exit(1)
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)  # a parent that ignores it would hand that down
    signal.alarm(seconds)
    limit_cpu(cpu_seconds)
    for limit, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 256), (resource.RLIMIT_FSIZE, file_bytes)):
        hard = resource.getrlimit(limit)[1]
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (value, value))
    limit_memory(memory)
    os.nice(10)
