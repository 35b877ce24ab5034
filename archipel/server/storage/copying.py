"""Copies all files from one store to another, such as from a folder to a bucket, and compares digests on both sides."""

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
"""The form of the server's keys, with the digest as its group. Files with other names are not the server's."""


@dataclass(frozen=True)
class Copied:
    """`files` files with `bytes` bytes in all were copied; `there` files were in the target already."""

    files: int
    bytes: int
    there: int


def copy_files(settings: Settings, blobs: str) -> Copied:
    """Copy all files of a stopped server to another store.

    Files that are in the target already are compared and left, so an interrupted copy can be run again.

    Arguments:
        settings: The server's settings, which name the store to copy from.
        blobs: The store to copy to, in the form of the setting `blobs`.

    Raises:
        ServerError: The server is running, a file is damaged, or one of the stores cannot be used.

    Example:
        copy_files(load_settings("server"), "s3://bucket/archipel")
    """
    # A server that runs would go on storing into the old store, and the copy would lack that.
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
        match = KEY.fullmatch(key)
        if match is None:
            continue
        digest = match[1]
        if has_file(target, key, digest):
            there += 1
            continue
        size += copy_file(source, target, key, digest)
        files += 1
    return Copied(files, size, there)


def copy_file(source: Storage, target: Storage, key: str, digest: str) -> int:
    """Copy one file, read it back, and return its size in bytes. Raises ServerError if it is damaged, or OSError."""
    folder = key.rpartition("/")[0]
    target.make_folder(folder)
    written = target.receive(folder, source.stream(key))
    if written.digest != digest:
        written.discard()
        raise ServerError(f"{key}: damaged, its SHA-256 is {written.digest}; restore it or remove it")
    target.keep(written, key)
    # Read back, because the store's acknowledgement does not show which bytes it has.
    if not has_file(target, key, digest):
        raise ServerError(f"{key}: was copied, and other bytes came back")
    return written.size


def has_file(storage: Storage, key: str, digest: str) -> bool:
    """Whether the store has the file, with bytes of this digest."""
    try:
        return _sha256(storage.stream(key)) == digest
    except FileNotFoundError:
        return False


def _sha256(chunks: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()
