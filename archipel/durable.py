"""Writes, replaces, syncs, sweeps and locks files, so that they survive a kill and a power cut.

A kill ends the process between any two steps, but the kernel keeps everything that it was told. A power cut also loses
what is not synced: the bytes of a file until the file is synced, and a name (new, changed or removed) until its folder
is synced. Each function says what is on the disk after either, and what is certain once it has returned. The promises
for a power cut hold on disks and file systems that honour fsync.

Temporary files and folders are beside the file that they become and are called `.NAME.TOKEN.tmp`. A killed process
leaves them behind, and `sweep` removes them. A `mode` is that of a new file, less the process's umask. All functions
raise OSError, which names what the caller asked for, and no temporary file.
"""

from __future__ import annotations

import errno
import glob
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

from archipel.errors import LockedError

_SUFFIX = ".tmp"
_CHUNK = 1 << 20
_ASK_AGAIN_SECONDS = 0.01

# --- files --------------------------------------------------------------------------------------------------------


@contextmanager
def replacing(path: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """Give an empty file, open for writing; when the block ends without an error, that file replaces `path`.

    Steps: temporary file, block, sync of the file, rename, sync of the folder. After a kill or a power cut at any of
    them `path` is the old file or the whole new one; once this has ended, it is the new one. After an error in the
    block `path` is the old file and nothing else stays. After an error in the sync of the folder the new file is there,
    and a power cut may bring the old one back.

    Example:
        with replacing(Path("settings.json")) as file:
            file.write(b"{}")
    """
    # In the same folder, so that the rename stays on one file system, where it is atomic.
    temporary = _temporary_path(path)
    with _naming(path, temporary):
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                # Before the rename: otherwise a power cut may leave the new name with none of the new bytes.
                sync_open(file)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def write_durably(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace the contents of `path` by `data`, as `replacing` does. The file need not exist; its folder must."""
    with replacing(path, mode) as file:
        file.write(data)


@contextmanager
def creating(path: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """Give a new file, open for writing, that has its name at once, so that nobody else can take the name.

    Raises FileExistsError where the file exists: it is never replaced. Steps: the file under its name, block, sync of
    the file, sync of the folder. After a kill or a power cut before the end the file may have a part of its bytes, or
    not exist. Once this has ended it is complete. After an error in the block it is gone.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with _naming(path, path), os.fdopen(handle, "wb") as file:
            yield file
            sync_open(file)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def create_durably(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write `data` to a new file, as `creating` does. Raises FileExistsError where the file exists, and leaves it."""
    with creating(path, mode) as file:
        file.write(data)


def publish(temporary: Path, path: Path) -> None:
    """Rename a file or folder, synced before with all that is in it, to `path`, and sync the folder of `path`.

    Both must be on one file system. A file or an empty folder at `path` is replaced; another folder there is an
    OSError. After a kill or a power cut the old or the new one is at `path`; once this has returned, the new one. Where
    `temporary` is in another folder, a power cut may bring its name back there, because only the folder of `path` is
    synced.
    """
    os.replace(temporary, path)
    sync_folder(path.parent)


def publish_unsynced(temporary: Path, path: Path) -> None:
    """As `publish`, of a file that is not synced yet. Name and bytes go to the disk together, in half the time.

    Until this has returned a power cut may leave a part of the file at `path`: only for readers who learn afterwards
    that it counts, and where nothing was at `path`. A file that is there is replaced as `publish` does, once the
    temporary one is synced. After a kill `path` is missing or whole, and the temporary name may still be there, too.
    """
    try:
        # Unlike a rename it never takes the place of a file that somebody may rely on already.
        os.link(temporary, path)
    except FileNotFoundError:
        raise
    except OSError:  # there is such a file, or the file system has no links
        sync_file(temporary)
        publish(temporary, path)
        return
    temporary.unlink()
    sync_file(path)
    sync_folder(path.parent)


def remove_durably(path: Path) -> bool:
    """Remove the file and sync its folder. Returns whether it was there.

    After a kill or a power cut it may still be there; once this has returned it is gone for good.
    """
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    sync_folder(path.parent)
    return True


def overwrite(path: Path) -> bool:
    """Overwrite the file's bytes with random ones, in place, and sync it. Returns whether it was there.

    It does not follow links. After a kill or a power cut some of the file is overwritten; once this has returned, all
    of it. Flash and copy-on-write file systems write elsewhere and keep the old blocks for a while.
    """
    try:
        handle = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        size, done = os.fstat(handle).st_size, 0
        # A write may take less than it was given.
        while done < size:
            done += os.pwrite(handle, os.urandom(min(size - done, _CHUNK)), done)
        os.fsync(handle)
    finally:
        os.close(handle)
    return True


# --- folders ------------------------------------------------------------------------------------------------------


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Make the folder with `mode`, and its parents with the default one. A folder that exists is not synced.

    After a kill or a power cut some of the parents may be there; once this has returned all of them are.
    """
    if path.is_dir():
        return
    # Not `mkdir(parents=True)`: the name of each new folder has to be synced in its own parent.
    make_folder(path.parent)
    path.mkdir(mode, exist_ok=True)
    sync_folder(path.parent)


@contextmanager
def temporary_folder(path: Path, mode: int = 0o777) -> Iterator[Path]:
    """Give a new, empty folder beside `path`, to be filled and published; at the end it is removed if still there.

    After a kill or a power cut it may stay, with anything in it, until `sweep`.
    """
    temporary = _temporary_path(path)
    with _naming(path, temporary):
        temporary.mkdir(mode)
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def creating_folder(path: Path, mode: int = 0o777) -> Iterator[Path]:
    """Give an empty folder to be filled; when the block ends without an error it becomes `path`.

    `path` must not exist or be an empty folder; its parent must exist. Steps: temporary folder, block, sync of
    everything in it, rename, sync of the parent. After a kill or a power cut at any of them `path` is as before, or the
    whole folder; once this has ended it is the whole folder. After an error `path` is as before and nothing else stays.
    """
    with temporary_folder(path, mode) as temporary:
        yield temporary
        sync_tree(temporary)
        publish(temporary, path)


def replace_folder(folder: Path, path: Path) -> None:
    """Rename `folder`, synced before with all that is in it, to `path`; remove the folder that is there.

    Both must have the same parent. No rename replaces a folder with something in it, so the old one first gets a
    temporary name. After a kill, a power cut or an error `path` is the old folder, the new one, or missing: a caller
    that must always have one has to record first which folder belongs there. Once this has returned it is the new one.
    The old one may stay under its temporary name, after a power cut or where it could not be removed.
    """
    old = _temporary_path(path)
    if path.exists():
        os.replace(path, old)
    publish(folder, path)
    shutil.rmtree(old, ignore_errors=True)


def sweep(folder: Path, name: str = "") -> None:
    """Remove the temporary files and folders that killed processes left in `folder`; with `name` only those of it.

    Nobody else may be writing there. The folder is not synced: what a power cut brings back is swept the next time.
    """
    # Names are escaped: a file called "*" must not sweep those of others.
    for path in folder.glob(f".{glob.escape(name) or '*'}.*{_SUFFIX}"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


# --- errors -------------------------------------------------------------------------------------------------------


def is_full(error: OSError) -> bool:
    """Whether the disk, or the user's share of it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def reason_of(error: OSError) -> str:
    """What the system says about a file that cannot be written, without its name, and what helps where the disk is
    full: for the text of an error."""
    return f"{error.strerror or type(error).__name__}{'; free some space and run again' if is_full(error) else ''}"


# --- syncing ------------------------------------------------------------------------------------------------------


def sync_open(file: IO[bytes] | int) -> None:
    """Put the bytes written to the open file (or handle) on the disk, so that they survive a power cut."""
    if isinstance(file, int):
        os.fsync(file)
    else:
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Put the bytes of the file on the disk, whoever wrote them. `sync_folder` of its folder does so with its name."""
    _sync(path, os.O_RDONLY)


def sync_folder(folder: Path) -> None:
    """Put the names in the folder on the disk: of files that were made, renamed or removed there."""
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def sync_tree(folder: Path) -> None:
    """Put everything below the folder on the disk, and the names in it; its own name belongs to its parent."""
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        else:
            sync_file(path)
    sync_folder(folder)


def sync_many(folder: Path) -> None:
    """As `sync_tree`, at the price of one call where the system has it: for thousands of files, of which few changed.

    That call also waits for what other processes wrote, below the folder or elsewhere.
    """
    if hasattr(os, "sync"):
        os.sync()
    else:  # Windows
        sync_tree(folder)


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- locks --------------------------------------------------------------------------------------------------------


def take_lock(handle: int, *, shared: bool = False, timeout: float | None = 0.0) -> None:
    """Lock the open file exclusively, or `shared` with other shared locks, until the handle is closed.

    `timeout`: seconds to wait for others, None: as long as it takes. Raises LockedError where another holder has the
    lock after that. The lock is in the kernel only, which releases it when the process ends, by a kill, too. Two
    handles of one process exclude each other as well.
    """
    import fcntl  # here, because Windows has no fcntl, and most users of this file take no lock

    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    if timeout is None:
        fcntl.flock(handle, kind)
        return
    # flock has no timeout of its own, so ask again and again.
    deadline = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise LockedError("another process, or another part of this one, holds the lock") from None
        time.sleep(_ASK_AGAIN_SECONDS)


def release_lock(handle: int) -> None:
    """Release the lock of an open file, which stays open."""
    import fcntl

    fcntl.flock(handle, fcntl.LOCK_UN)


def open_locked(path: Path, *, shared: bool = False, timeout: float | None = 0.0) -> int:
    """Open and lock the lock file, as `take_lock` does; it is made, with mode 0600, where it does not exist.

    Returns the handle: close it to release the lock. The file itself stays, and its contents do not matter. Raises
    LockedError, which names the file.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        take_lock(handle, shared=shared, timeout=timeout)
    except BaseException as error:
        os.close(handle)
        if isinstance(error, LockedError):
            raise LockedError(f"{path}: {error}") from None
        raise
    return handle


def is_at(handle: int, path: Path) -> bool:
    """Whether `path` still is the open file: it may have been renamed, replaced or removed before it was locked."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def _temporary_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}{_SUFFIX}")


@contextmanager
def _naming(path: Path, temporary: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.filename is None and is_full(error):
            # The system names no file in an error of a write; a user with several disks wants to know which is full.
            error.filename = str(path)
        elif isinstance(error.filename, str) and Path(error.filename).is_relative_to(temporary):
            # For the caller it is `path` that cannot be written; the temporary name would mean nothing.
            error.filename = str(path / Path(error.filename).relative_to(temporary))
            error.filename2 = None
        raise
