"""A process that does one thing of archipel.durable, again and again, and kills itself before its 1st, 2nd, ... call.

Run as `python victim.py ACTION TEMPLATE WORK`: WORK/000, WORK/001, ... are copies of the folder TEMPLATE as they are
after SIGKILL before the call with that number; the last of them is left by a whole run, of which the calls are printed.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import IO, Any, TypeVar

from archipel import durable

R = TypeVar("R")

CHANGING = ("open", "write", "pwrite", "fsync", "replace", "rename", "link", "unlink", "mkdir", "rmdir")
"""Functions of `os` through which a process changes folders and files, or has them synced."""


def put(path: Path, data: bytes) -> None:
    """Write a file as anybody does: nothing is synced."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.write(handle, data)
    os.close(handle)


def in_two(file: IO[bytes]) -> None:
    """Write "new" in two parts; a kill may come between them."""
    file.write(b"ne")
    file.flush()
    os.fsync(file.fileno())
    file.write(b"w")


def write(folder: Path) -> None:
    durable.write_durably(folder / "file", b"new")


def replacing(folder: Path) -> None:
    with durable.replacing(folder / "file") as file:
        in_two(file)


def create(folder: Path) -> None:
    durable.create_durably(folder / "made", b"new")


def creating(folder: Path) -> None:
    with durable.creating(folder / "made") as file:
        in_two(file)


def publish(folder: Path) -> None:
    durable.publish(folder / "parts" / "part", folder / "file")


def publish_unsynced(folder: Path) -> None:
    put(folder / "parts" / "part", b"new")
    durable.publish_unsynced(folder / "parts" / "part", folder / "file")


def remove(folder: Path) -> None:
    assert durable.remove_durably(folder / "file")


def overwrite(folder: Path) -> None:
    assert durable.overwrite(folder / "file")


def make_folder(folder: Path) -> None:
    durable.make_folder(folder / "a" / "b")


def creating_folder(folder: Path) -> None:
    with durable.creating_folder(folder / "made") as made:
        put(made / "one", b"1")
        os.mkdir(made / "deep")
        put(made / "deep" / "two", b"2")


def replace_folder(folder: Path) -> None:
    with durable.temporary_folder(folder / "kept") as new:
        put(new / "one", b"new")
        durable.sync_tree(new)
        durable.replace_folder(new, folder / "kept")


def sweep(folder: Path) -> None:
    durable.sweep(folder)


def lock(folder: Path) -> None:
    os.close(durable.open_locked(folder / "lock"))


ACTIONS: dict[str, Callable[[Path], None]] = {
    each.__name__: each
    for each in (
        write, replacing, create, creating, publish, publish_unsynced, remove, overwrite, make_folder,
        creating_folder, replace_folder, sweep, lock,
    )
}  # fmt: skip


class Watched:
    """Counts the calls, notes what each did, and kills the process before the one with number `stop`."""

    def __init__(self, folder: Path, stop: int) -> None:
        self._folder, self._stop = folder.resolve(), stop
        self.calls: list[dict[str, str]] = []

    def begin(self) -> None:
        numbers = count(1)
        secrets.token_hex = lambda size: f"t{next(numbers)}"  # type: ignore[assignment] # names that can be expected
        for name in CHANGING:
            setattr(os, name, self._watched(name, getattr(os, name)))

    def _watched(self, name: str, real: Callable[..., R]) -> Callable[..., R]:
        def call(*arguments: Any, **options: Any) -> R:
            if len(self.calls) == self._stop:
                os.kill(os.getpid(), signal.SIGKILL)
            call = {"name": name, "path": self._name(arguments[0], options)}
            if name in ("replace", "rename", "link"):
                call["to"] = self._name(arguments[1], options)
            if name == "open" and arguments[1] & os.O_CREAT:
                call["makes"] = "yes"
            self.calls.append(call)
            try:
                result = real(*arguments, **options)
            except OSError:
                call["fails"] = "yes"
                raise
            if name == "fsync":
                path = self._folder / call["path"]
                call["data"] = "" if path.is_dir() else path.read_text(errors="replace")
            return result

        return call

    def _name(self, what: int | str | os.PathLike[str], options: dict[str, Any]) -> str:
        """Relative to the folder, of a path or an open handle."""
        if isinstance(what, int):
            path = Path(os.readlink(f"/proc/self/fd/{what}"))
        else:
            at = options.get("dir_fd")
            path = Path(what if at is None else os.path.join(os.readlink(f"/proc/self/fd/{at}"), what))
        return path.relative_to(self._folder).as_posix()


def main(action: str, template: Path, work: Path) -> None:
    for step in count():
        folder = work / f"{step:03}"
        shutil.copytree(template, folder)
        pid = os.fork()
        if not pid:
            watched = Watched(folder, step)
            watched.begin()
            ACTIONS[action](folder.resolve())
            print(json.dumps(watched.calls), flush=True)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code != -signal.SIGKILL:
            assert code == 0, code
            return


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
