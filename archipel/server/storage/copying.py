"""From one store to another, as from a folder to a bucket: every file compared with its digest on both sides."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from archipel.errors import ServerError
from archipel.server.settings import Settings, load_settings
from archipel.server.storage import BLOBS, UPDATES, Storage, open_storage
from archipel.server.storage.lock import LOCK_FILE, only_one

KEY = re.compile(rf"(?:{BLOBS}/[0-9a-f]{{2}}/|{UPDATES}/[0-9a-z]+/[0-9a-z]+\.)([0-9a-f]{{64}})")
"""What the server names its files; anything else belongs to somebody else."""


@dataclass(frozen=True)
class Copied:
    """`files` of so many `bytes` were copied, `there` had been before."""

    files: int
    bytes: int
    there: int


def copy_files(settings: Settings, blobs: str) -> Copied:
    """Copy everything that the stopped server has to where `blobs` says: what the setting will be afterwards.

    What is there already is compared and left, so it can be run again after an interruption. Raises ServerError when
    the server runs, when a file is damaged, or when one of the stores cannot be used.
    """
    with only_one(settings.path(LOCK_FILE)):
        target_settings = load_settings(settings.folder, blobs=blobs)
        source, target = open_storage(settings), open_storage(target_settings)
        source.prepare()
        target.prepare()
        try:
            return _copy(source, target)
        except OSError as error:
            raise ServerError(f"{error}; run it again to go on") from None


def _copy(source: Storage, target: Storage) -> Copied:
    files = size = there = 0
    for key in source.keys(""):
        found = KEY.fullmatch(key)
        if found is None:
            continue
        digest = found[1]
        if has_file(target, key, digest):
            there += 1
            continue
        size += copy_file(source, target, key, digest)
        files += 1
    return Copied(files, size, there)


def copy_file(source: Storage, target: Storage, key: str, digest: str) -> int:
    """Copy one file and read it back; its bytes. Raises ServerError for one that is damaged, or OSError."""
    folder = key.rpartition("/")[0]
    target.make_folder(folder)
    written = target.receive(folder, source.stream(key))
    if written.digest != digest:
        written.discard()
        raise ServerError(f"{key}: damaged, its SHA-256 is {written.digest}; restore it or remove it")
    target.keep(written, key)
    if not has_file(target, key, digest):
        raise ServerError(f"{key}: was copied, and other bytes came back")
    return written.size


def has_file(storage: Storage, key: str, digest: str) -> bool:
    """Whether the file is there, with these bytes."""
    try:
        return _sha256(storage.stream(key)) == digest
    except FileNotFoundError:
        return False


def _sha256(chunks: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()
