"""A disk of a few pages, which is full at once: a tmpfs, which only root may mount."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


@cache
def why_not() -> str:
    """Why this machine cannot have one; empty where it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "mounting a small disk needs root on Linux"
    with TemporaryDirectory() as folder:
        tried = _mount(Path(folder), "size=4k")
        if tried.returncode:
            return f"mounts are not allowed here: {tried.stderr.strip()}"
        _unmount(Path(folder))
    return ""


@contextmanager
def small_disk(folder: Path, pages: int, files: int = 0) -> Iterator[Path]:
    """The new folder, as a disk of that many pages of 4 KiB; `files`: how many files and folders it holds, 0: any."""
    folder.mkdir()
    # The root folder of the disk counts as one of its files.
    mounted = _mount(folder, f"size={pages * PAGE_BYTES}" + (f",nr_inodes={files + 1}" if files else ""))
    assert mounted.returncode == 0, mounted.stderr
    try:
        yield folder
    finally:
        _unmount(folder)
        folder.rmdir()


def _mount(folder: Path, options: str) -> subprocess.CompletedProcess[str]:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _unmount(folder: Path) -> None:
    # Lazily: a mapped file of an error's traceback may keep it busy.
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
