"""Documents of models, kept by what they are made of: each is made once for all who may see the model.

They lie in a folder of the data folder, of which any file may be removed at any time. One document is made at a time
for one data folder, in a thread that waits for the process; who asks meanwhile is told to ask again, so no request
waits.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import math
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from archipel import __version__
from archipel.durable import open_locked
from archipel.errors import ArchipelError, LockedError
from archipel.server.dashboard.insight.process import MOST_MODEL_BYTES, make_document

DOCUMENTS = "archipel.insight"
"""The name of an application's Documents among its extensions."""
FORM = 1
"""Another one when what is made of the same model is to be another."""
MOST_BYTES = 256 << 20
"""Bytes of all documents that are kept, packed."""
KEPT_SECONDS = 30 * 86400.0
"""A document that nobody has looked at for so long is removed, with the next one that is made."""
PROBLEM_SECONDS = 600.0
"""After this time a document that could not be made is tried again."""
SOON_SECONDS = 10.0
"""The same where the model's files could not be read just now."""
_COPY = 1 << 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """A document that is wanted. `made_of` names its content: the kind, and digests of bundles and weights.

    `request` is for the process that makes it. It names the files and folders that are read as they are called there:
    what gives each of the `files`, and the `folders`, which need not exist, by these names."""

    made_of: tuple[str, ...]
    request: Mapping[str, Any]
    files: Mapping[str, Callable[[], AbstractContextManager[Path]]]
    folders: Mapping[str, Path]

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps([FORM, __version__, *self.made_of]).encode()).hexdigest()


@dataclass(frozen=True)
class Ready:
    """A document: an open file of JSON that is packed with gzip, and its size in bytes."""

    file: BinaryIO
    size: int


@dataclass(frozen=True)
class Problem:
    """Why there is no document, for people."""

    text: str


class Documents:
    """The documents of one data folder; web processes that share it share them.

    Arguments:
        folder: where they are kept; it is made when the first one is.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._making = threading.Lock()

    def find(self, wanted: Wanted) -> Ready | Problem | None:
        """The document; None while it is not made yet: it is being made, or waits for others. Ask again."""
        found = self._look(wanted.key)
        if found is not None:
            return found
        if self._making.acquire(blocking=False):
            lock: int | None = None
            try:
                lock = self._lock()
                if lock is None:
                    self._making.release()
                else:
                    threading.Thread(target=self._make, args=(wanted, lock), name="insight", daemon=True).start()
            except BaseException:
                # No folder, or no further thread: the next request tries it again.
                if lock is not None:
                    os.close(lock)
                self._making.release()
                raise
        return None

    def _look(self, key: str) -> Ready | Problem | None:
        path = self._folder / f"{key}.gz"
        with suppress(FileNotFoundError):
            file = path.open("rb")
            os.utime(path)
            return Ready(file, os.fstat(file.fileno()).st_size)
        path = self._folder / f"{key}.txt"
        with suppress(FileNotFoundError):
            if time.time() < path.stat().st_mtime:
                return Problem(path.read_text(encoding="utf-8"))
        return None

    def _lock(self) -> int | None:
        """The lock of who makes a document, for all processes of the data folder; None while another one has it."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        try:
            return open_locked(self._folder / "lock")
        except LockedError:
            return None

    def _make(self, wanted: Wanted, lock: int) -> None:
        try:
            # Another process may have made it between the look and the lock.
            if not (self._folder / f"{wanted.key}.gz").exists():
                self._sweep()
                self._write(wanted)
        except Exception:  # noqa: BLE001 - else the thread would end without a word, and the page would ask for ever
            _log.exception("insight: a document could not be made")
            self._keep_problem(wanted.key, "it could not be made; the server's log says why", PROBLEM_SECONDS)
        finally:
            os.close(lock)
            self._making.release()

    def _write(self, wanted: Wanted) -> None:
        folder = Path(tempfile.mkdtemp(prefix="making-", dir=self._folder))
        try:
            with ExitStack() as held:
                paths = {name: held.enter_context(give()) for name, give in wanted.files.items()}
                large = max((path.stat().st_size for path in paths.values()), default=0)
                if large > MOST_MODEL_BYTES:
                    self._keep_problem(
                        wanted.key,
                        f"its file has {large:,} bytes, and the server looks into at most {MOST_MODEL_BYTES:,}; look "
                        "at it with `archipel insight FILE` on your machine",
                        PROBLEM_SECONDS,
                    )
                    return
                reads = {name: path.resolve() for name, path in {**paths, **wanted.folders}.items()}
                for name, path in reads.items():
                    # By links, so that no text of the process has a path of this machine.
                    (folder / name).symlink_to(path)
                made = make_document(wanted.request, reads.values(), folder.resolve())
            if isinstance(made, str):
                self._keep_problem(wanted.key, made, PROBLEM_SECONDS)
            else:
                with made:
                    self._keep(wanted.key, made, folder)
        except (ArchipelError, OSError) as error:
            _log.warning("insight: %s", error)
            self._keep_problem(wanted.key, "its files cannot be read at this moment; try again", SOON_SECONDS)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _keep(self, key: str, document: BinaryIO, folder: Path) -> None:
        packed = folder / "packed"
        with gzip.open(packed, "wb", compresslevel=4) as out:
            while part := document.read(_COPY):
                out.write(part)
        # Nothing is synced: after a power cut a file that is damaged may be removed, as any other.
        packed.replace(self._folder / f"{key}.gz")
        self._make_room()

    def _keep_problem(self, key: str, text: str, seconds: float) -> None:
        path = self._folder / f"{key}.txt"
        written = path.with_suffix(".part")
        with suppress(OSError):
            written.write_text(text, encoding="utf-8")
            until = time.time() + seconds
            os.utime(written, (until, until))
            written.replace(path)

    def _make_room(self) -> None:
        """Remove the documents that were looked at least lately, as long as all take more than MOST_BYTES."""
        files = [(path, path.stat()) for path in self._folder.glob("*.gz")]
        total = sum(status.st_size for _, status in files)
        for path, status in sorted(files, key=lambda each: each[1].st_mtime)[:-1]:
            if total <= MOST_BYTES:
                break
            path.unlink(missing_ok=True)
            total -= status.st_size

    def _sweep(self) -> None:
        """Remove what killed processes have left, and what is old. Under the lock: nobody works in these folders."""
        now = time.time()
        for path in self._folder.iterdir():
            if path.name.startswith("making-"):
                shutil.rmtree(path, ignore_errors=True)
                continue
            since = {".gz": now - KEPT_SECONDS, ".txt": now, ".part": math.inf}.get(path.suffix, -math.inf)
            if path.stat().st_mtime < since:
                path.unlink(missing_ok=True)
