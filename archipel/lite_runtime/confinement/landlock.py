"""Landlock: a process gives up every file but those it names, for itself and its threads, for good.

Source: Documentation/userspace-api/landlock.rst and include/uapi/linux/landlock.h of Linux. The three system calls have
no wrappers in the C library; their numbers are the same on every architecture.
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

# What a version can forbid, by the version that brought it.
_FILES = {1: (1 << 13) - 1, 2: _REFER, 3: _TRUNCATE, 5: _IOCTL_DEV}
_TCP = {4: 0b11}  # bind, connect
_SCOPES = {6: 0b11}  # abstract Unix sockets and signals of processes outside


class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("tcp", ctypes.c_uint64), ("scopes", ctypes.c_uint64)]


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def landlock_version() -> int:
    """The version (ABI) of Landlock that this kernel has; 0 for none, or where it is switched off."""
    if not hasattr(os, "O_PATH"):
        return 0
    found = _libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)
    return max(0, int(found))


def restrict_files(read: Iterable[Path | str], write: Iterable[Path | str], devices: Iterable[Path | str] = ()) -> int:
    """From now on this thread, and threads it starts, open nothing but what lies at or below these paths; nothing can
    be executed. TCP, and signals and abstract sockets of other processes, are given up where the kernel can do that.

    Paths that are not there are left out. Needs no_new_privs. Returns the version that holds, 0 where the kernel has no
    Landlock. Raises OSError.
    """
    version = landlock_version()
    if version == 0:
        return 0
    files, tcp, scopes = (_up_to(version, table) for table in (_FILES, _TCP, _SCOPES))
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
        if not stat.S_ISDIR(os.fstat(parent).st_mode):
            rights &= _OF_FILES
        rule = _Beneath(rights, parent)
        _call(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(parent)


def _call(number: int, *arguments: object) -> int:
    found: int = _libc().syscall(number, *arguments)
    if found < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"Landlock: {os.strerror(error)}")
    return found


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
