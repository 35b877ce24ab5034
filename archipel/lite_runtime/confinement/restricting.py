"""Takes rights from this process that running graphs does not need, as far as the kernel can, and reports which."""

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
    """How a process is confined: `landlock` is the version that limits the files it can open (0: no limit), `seccomp`
    whether the kernel refuses system calls for sockets, programs and other processes."""

    landlock: int
    seccomp: bool

    def __str__(self) -> str:
        files = f"files by Landlock (version {self.landlock})" if self.landlock else "files not limited (no Landlock)"
        calls = "system calls by seccomp" if self.seccomp else "system calls not limited (no seccomp)"
        return f"{files}, {calls}"


def kernel_offers() -> Confinement:
    """The confinement that this kernel could give."""
    return Confinement(landlock=landlock_version(), seccomp=seccomp_there())


def restrict(read: Iterable[Path | str], write: Iterable[Path | str], delegates: Iterable[str] = ()) -> Confinement:
    """Let this process open only `read` and `write` (folders or files), the libraries of Python and ONNX Runtime, and
    what `delegates` need; let it open no socket and start no program and no process. There is no way back.

    Call it while the process has one thread, since others would keep their rights. Raises OSError.
    """
    if sys.platform != "linux":
        return Confinement(landlock=0, seccomp=False)
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise OSError(f"{threads} threads run already, and Landlock would restrict only one of them")
    # Without this flag the kernel takes neither rules nor filters from a process that is not privileged.
    ctypes.CDLL(None, use_errno=True).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    needs = needs_of(delegates)
    version = restrict_files([*read, *libraries(), *needs.read], [*write, *needs.write], ["/dev/null", *needs.devices])
    return Confinement(landlock=version, seccomp=restrict_calls())
