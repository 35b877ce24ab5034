"""Landlock: a process gives up the right to open files other than those that it names, for good.

Threads that it starts later inherit the restriction. Source: Documentation/userspace-api/landlock.rst and
include/uapi/linux/landlock.h of Linux. The C library has no wrappers for the three system calls; their numbers are the
same on every architecture.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterable
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1
_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_DIR, _REMOVE_FILE = (1 << bit for bit in range(6))
_MAKE_DIR, _MAKE_REG = 1 << 7, 1 << 8
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_READ = _READ_FILE | _READ_DIR
_WRITE = _READ | _WRITE_FILE | _TRUNCATE | _MAKE_REG | _MAKE_DIR | _REMOVE_FILE | _REMOVE_DIR | _REFER
_DEVICE = _READ_FILE | _WRITE_FILE | _IOCTL_DEV
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV

# The rights that Landlock can restrict, by the version (ABI) that introduced them.
_FILES = {1: (1 << 13) - 1, 2: _REFER, 3: _TRUNCATE, 5: _IOCTL_DEV}
_TCP = {4: 0b11}  # bind, connect
_SCOPES = {6: 0b11}  # abstract Unix sockets and signals of processes outside


# The kernel's structs. Later versions appended fields; _Beneath is packed in the kernel, too.
class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("tcp", ctypes.c_uint64), ("scopes", ctypes.c_uint64)]


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def landlock_version() -> int:
    """The version (ABI) of this kernel's Landlock; 0 if it has none, or if Landlock is switched off."""
    if not hasattr(os, "O_PATH"):
        return 0
    version = _libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)
    return max(0, int(version))


def restrict_files(read: Iterable[Path | str], write: Iterable[Path | str], devices: Iterable[Path | str] = ()) -> int:
    """Let this thread, and threads that it starts, open only what lies at or below these paths, and execute nothing.

    As far as the kernel's version can do it, TCP, signals to other processes and their abstract sockets are given up
    too. Skips paths that do not exist. Needs no_new_privs. Returns the version that restricts, 0 if the kernel has no
    Landlock. Raises OSError.
    """
    version = landlock_version()
    if version == 0:
        return 0
    # A right must be in the ruleset to be restricted at all, and an older kernel refuses rights that it does not know.
    files, tcp, scopes = (_up_to(version, table) for table in (_FILES, _TCP, _SCOPES))
    # The size of the struct that this version knows: a kernel refuses bytes beyond it unless they are zero.
    size = 8 if version < 4 else 16 if version < 6 else 24
    attributes = _Ruleset(files, tcp, scopes)
    ruleset = _call(_CREATE_RULESET, ctypes.byref(attributes), ctypes.c_size_t(size), 0)
    try:
        for paths, rights in ((read, _READ), (write, _WRITE), (devices, _DEVICE)):
            for path in paths:
                _allow(ruleset, path, rights & files)
        _call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
    return version


def _up_to(version: int, table: dict[int, int]) -> int:
    return sum(bits for since, bits in table.items() if since <= version)


def _allow(ruleset: int, path: Path | str, rights: int) -> None:
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # nothing to allow
    try:
        # The kernel refuses rights of folders in a rule for a file.
        if not stat.S_ISDIR(os.fstat(parent).st_mode):
            rights &= _OF_FILES
        rule = _Beneath(rights, parent)
        _call(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(parent)


def _call(number: int, *arguments: object) -> int:
    result: int = _libc().syscall(number, *arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"Landlock: {os.strerror(error)}")
    return result


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
