"""Locks between processes: alone, shared, waiting, and released by a kill."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from archipel.durable import is_at, open_locked, release_lock, take_lock
from archipel.errors import ArchipelError, LockedError

HOLDER = """
import sys
from pathlib import Path
from archipel.durable import open_locked
open_locked(Path(sys.argv[1]), shared=sys.argv[2] == "shared")
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(path: Path, *, shared: bool = False) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), "shared" if shared else "alone"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path) as process:
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(LockedError, match=f"^{path}: another process"):
            open_locked(path)
        with pytest.raises(LockedError):
            open_locked(path, shared=True)
        process.kill()
        process.wait()
        os.close(open_locked(path))


def test_shared_locks(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path, shared=True):
        os.close(open_locked(path, shared=True))
        with pytest.raises(LockedError):
            open_locked(path)


def test_two_handles_of_one_process(tmp_path: Path) -> None:
    first = open_locked(tmp_path / "lock")
    with pytest.raises(LockedError):
        open_locked(tmp_path / "lock")
    release_lock(first)
    second = open_locked(tmp_path / "lock")
    os.close(first)
    os.close(second)


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_waiting_for_a_lock(tmp_path: Path, timeout: float | None) -> None:
    path = tmp_path / "lock"
    with holder(path) as process:
        timer = threading.Timer(0.2, process.kill)
        timer.start()
        os.close(open_locked(path, timeout=timeout))
        timer.join()


def test_waiting_has_an_end(tmp_path: Path) -> None:
    with holder(tmp_path / "lock"):
        started = time.monotonic()
        with pytest.raises(LockedError):
            open_locked(tmp_path / "lock", timeout=0.1)
        assert 0.1 <= time.monotonic() - started < 10


def test_nothing_stays_open_after_a_lock_that_another_holds(tmp_path: Path) -> None:
    handle = open_locked(tmp_path / "lock")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(LockedError):
            open_locked(tmp_path / "lock")
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(handle)


def test_a_lock_is_not_handed_on_to_children(tmp_path: Path) -> None:
    handle = open_locked(tmp_path / "lock")
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    os.close(handle)
    os.close(open_locked(tmp_path / "lock"))
    child.communicate()


def test_a_folder_can_be_locked(tmp_path: Path) -> None:
    first, second = (os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY) for _ in range(2))
    take_lock(first)
    with pytest.raises(LockedError):
        take_lock(second)
    os.close(first)
    take_lock(second)
    os.close(second)


def test_whether_a_handle_still_has_its_name(tmp_path: Path) -> None:
    handle = open_locked(tmp_path / "lock")
    assert is_at(handle, tmp_path / "lock")
    (tmp_path / "lock").rename(tmp_path / "other")
    assert not is_at(handle, tmp_path / "lock")
    assert is_at(handle, tmp_path / "other")
    (tmp_path / "lock").write_bytes(b"")
    assert not is_at(handle, tmp_path / "lock")
    os.close(handle)


def test_what_is_no_lock_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        open_locked(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_locked(tmp_path / "nowhere" / "lock")
    assert issubclass(LockedError, ArchipelError)
    assert not issubclass(LockedError, OSError)
