"""Take from this process what running graphs does not need, as far as the kernel can do it, and say how far that is."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from archipel.lite_runtime.confinement.landlock import landlock_version, restrict_files
from archipel.lite_runtime.confinement.places import libraries, needs_of
from archipel.lite_runtime.confinement.seccomp import restrict_calls, seccomp_there

_NO_NEW_PRIVILEGES = 38  # PR_SET_NO_NEW_PRIVS of linux/prctl.h


class Confinement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What holds a process that runs graphs. `landlock` is the version that limits which files it can open (0: nothing
    does), `seccomp` whether system calls for sockets, programs and other processes are refused."""

    landlock: int
    seccomp: bool

    def __str__(self) -> str:
        files = f"files by Landlock (version {self.landlock})" if self.landlock else "files not limited (no Landlock)"
        calls = "system calls by seccomp" if self.seccomp else "system calls not limited (no seccomp)"
        return f"{files}, {calls}"


def kernel_offers() -> Confinement:
    """What this kernel has, whether or not anything uses it."""
    return Confinement(landlock=landlock_version(), seccomp=seccomp_there())


def restrict(read: Iterable[Path | str], write: Iterable[Path | str], delegates: Iterable[str] = ()) -> Confinement:
    """From now on this process opens only `read` and `write` (folders or files), the libraries of Python and ONNX
    Runtime, and what `delegates` need; it opens no socket, starts no program and no process. There is no way back.

    To be called while there is one thread: others would keep their rights. Raises OSError.
    """
    if sys.platform != "linux":
        return Confinement(landlock=0, seccomp=False)
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise OSError(f"{threads} threads run already, and Landlock would hold one of them only")
    ctypes.CDLL(None, use_errno=True).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    needs = needs_of(delegates)
    version = restrict_files([*read, *libraries(), *needs.read], [*write, *needs.write], ["/dev/null", *needs.devices])
    return Confinement(landlock=version, seccomp=restrict_calls())
