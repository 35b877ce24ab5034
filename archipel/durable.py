"""The one place that writes, replaces, syncs, sweeps and locks files, so that they outlive a kill and a power cut.

A kill ends the process between any two steps; what the kernel was told stays. A power cut loses, too, what was not
synced: the bytes of a file until the file is synced, and a name (new, changed or removed) until its folder is synced.
Each function says what is there after either, and what is certain once it has returned. What it promises for a power
cut holds on disks and file systems that honour fsync.

Temporary files and folders lie beside what they become and are called `.NAME.TOKEN.tmp`: a killed process leaves them
behind, and `sweep` removes them. A mode is what a new file gets, less the process's umask. All functions raise OSError.
"""

from __future__ import annotations

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
    them `path` is what it was, or the whole new file; once this has ended, it is the new file. After an error in the
    block `path` is what it was and nothing else stays. After an error in the sync of the folder the new file is there,
    and a power cut may bring the old one back.
    """
    temporary = _beside(path)
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except OSError as error:
        raise _about(path, error) from None
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            sync_open(file)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_durably(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace `path` by `data`, as `replacing` does: the old file or the new one at any time, the new one from here on.

    The file need not be there before; its folder must be.
    """
    with replacing(path, mode) as file:
        file.write(data)


@contextmanager
def creating(path: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """Give a new file, open for writing, that has its name at once: until the block ends nobody else can take it.

    Raises FileExistsError; a file that is there is never replaced. Steps: the file under its name, block, sync of the
    file, sync of the folder. After a kill or a power cut before the end the file may be there with a part of its bytes,
    or none. Once this has ended it is there as a whole. After an error in the block it is gone.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            sync_open(file)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def create_durably(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write `data` to a new file, as `creating` does. Raises FileExistsError; a file that is there stays as it is."""
    with creating(path, mode) as file:
        file.write(data)


def publish(temporary: Path, path: Path) -> None:
    """Rename a file or folder, synced before with all that is in it, to `path`, and sync the folder of `path`.

    Both are on one file system. A file at `path` is replaced, an empty folder as well; another folder is an OSError.
    After a kill or a power cut the old or the new one is at `path`; once this has returned it is the new one. Where
    `temporary` was in another folder, a power cut may bring back its name there.
    """
    os.replace(temporary, path)
    sync_folder(path.parent)


def remove_durably(path: Path) -> bool:
    """Remove the file and sync its folder; whether it was there.

    After a kill or a power cut it is there or not; once this has returned it is gone for good.
    """
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    sync_folder(path.parent)
    return True


def overwrite(path: Path) -> bool:
    """Put random bytes in the place of the file's own, where they lie on the disk, and sync it; whether it was there.

    Follows no link. After a kill or a power cut any part of the file is overwritten; once this has returned, all of it.
    Flash and copy-on-write file systems write elsewhere and keep the old blocks for a while.
    """
    try:
        handle = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        size, done = os.fstat(handle).st_size, 0
        while done < size:
            done += os.pwrite(handle, os.urandom(min(size - done, _CHUNK)), done)
        os.fsync(handle)
    finally:
        os.close(handle)
    return True


# --- folders ------------------------------------------------------------------------------------------------------


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Make the folder, its parents too, with `mode` for itself alone. One that is there is left as it is, not synced.

    After a kill or a power cut some of the parents may be there; once this has returned all of them are.
    """
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(mode, exist_ok=True)
    sync_folder(path.parent)


@contextmanager
def temporary_folder(path: Path, mode: int = 0o777) -> Iterator[Path]:
    """Give a new, empty folder beside `path`, to be filled and published; what is left of it at the end is removed.

    After a kill or a power cut it may be there, with anything in it, until `sweep`.
    """
    temporary = _beside(path)
    try:
        temporary.mkdir(mode)
    except OSError as error:
        raise _about(path, error) from None
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def creating_folder(path: Path, mode: int = 0o777) -> Iterator[Path]:
    """Give an empty folder to be filled; when the block ends without an error it is `path`, with all that is in it.

    `path` is not there, or an empty folder; its parent is there. Steps: temporary folder, block, sync of everything in
    it, rename, sync of the parent. After a kill or a power cut at any of them `path` is as before, or the whole folder;
    once this has ended it is the whole folder. After an error `path` is as before and nothing else stays.
    """
    with temporary_folder(path, mode) as temporary:
        yield temporary
        sync_tree(temporary)
        publish(temporary, path)


def replace_folder(folder: Path, path: Path) -> None:
    """Let `folder`, synced before with all that is in it, be `path`; a folder that is there is removed.

    Both have the same parent. No rename replaces a folder with something in it, so the old one first goes to a
    temporary name. After a kill, a power cut or an error `path` is the old folder, the new one, or nothing: whoever
    cannot do without it notes before what is to be there. Once this has returned it is the new one, and the old one may
    still be there under its temporary name, after a power cut or where it could not be removed.
    """
    old = _beside(path)
    if path.exists():
        os.replace(path, old)
    publish(folder, path)
    shutil.rmtree(old, ignore_errors=True)


def sweep(folder: Path, name: str = "") -> None:
    """Remove the temporary files and folders that killed processes left in `folder`; with `name` only those for it.

    Nobody else may be writing there. It is not synced: what a power cut brings back is swept again.
    """
    for path in folder.glob(f".{glob.escape(name) or '*'}.*{_SUFFIX}"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


# --- syncing ------------------------------------------------------------------------------------------------------


def sync_open(file: IO[bytes] | int) -> None:
    """Put the bytes of the open file (or handle) on the disk: what was written to it outlives a power cut."""
    if isinstance(file, int):
        os.fsync(file)
    else:
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Put the bytes of the file on the disk, whoever wrote them. Its name is its folder's: `sync_folder`."""
    _sync(path, os.O_RDONLY)


def sync_folder(folder: Path) -> None:
    """Put the names in the folder on the disk: files that were made, renamed or removed there."""
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def sync_tree(folder: Path) -> None:
    """Put everything below the folder on the disk, and the names in it; its own name is its parent's."""
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        else:
            sync_file(path)
    sync_folder(folder)


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- locks --------------------------------------------------------------------------------------------------------


def take_lock(handle: int, *, shared: bool = False, timeout: float | None = 0.0) -> None:
    """Lock the open file for its holder alone, or `shared` with other shared locks, until the handle is closed.

    `timeout`: seconds to wait for others, None: as long as it takes. Raises LockedError where another holds it after
    that. The end of a process, a kill as well, releases its locks, so none is left behind; nothing of it is on the
    disk. Two handles of one process keep each other out, too.
    """
    import fcntl  # Unix only; who takes no lock can do without

    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    if timeout is None:
        fcntl.flock(handle, kind)
        return
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
    """Release the lock of an open file that is used on."""
    import fcntl

    fcntl.flock(handle, fcntl.LOCK_UN)


def open_locked(path: Path, *, shared: bool = False, timeout: float | None = 0.0) -> int:
    """Open the lock file, made with mode 0600 where it is not there, and lock it, as `take_lock`; close it to release.

    Raises LockedError that names the file. The file stays, and holds nothing that matters.
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
    """Whether `path` is the open file: somebody may have renamed, replaced or removed it before the lock was taken."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}{_SUFFIX}")


def _about(path: Path, error: OSError) -> OSError:
    # Nobody knows the temporary name; what cannot be written is `path`.
    return OSError(error.errno, error.strerror, str(path))
