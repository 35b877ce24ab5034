"""Bundles and weights by digest. All bytes are verified before use, and no look-up finds a half-written file."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from archipel.bundle import Bundle, open_bundle, read_weights
from archipel.client.downloads.piece_index import PieceIndex
from archipel.durable import publish, sync_file
from archipel.errors import BundleError, DigestError

Download = Callable[[str, Path, int], bool | None]
"""(path on the server, file to write or continue, largest size in bytes). True: parts came from other files."""

T = TypeVar("T")

_BUNDLES = "bundles"
_BLOBS = "blobs"
_PARTS = "parts"
_PIECES = "pieces"


class Cache:
    """A folder of unpacked bundles, weights and unfinished downloads. One process at a time uses it.

    `index` finds parts of new files in those that are here. `allow_development` is as for `open_bundle`.
    """

    def __init__(self, folder: Path, max_bytes: int, *, allow_development: bool = False) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._allow_development = allow_development
        for name in (_BUNDLES, _BLOBS, _PARTS):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for path in (folder / _BUNDLES).glob(".unpack-*"):
            # A process was killed while it unpacked this.
            _remove(path)
        self.index = PieceIndex(folder / _PIECES, [folder / _BLOBS, folder / _BUNDLES])

    def bundle(self, digest: str, trusted_keys: Sequence[bytes], download: Download, limit: int) -> Bundle:
        """The bundle whose manifest has this SHA-256, fetched if it is not here, with signature and digests verified.

        `limit` is the largest size in bytes. Raises a BundleError if the server's file is wrong, or what `download`
        raises.
        """
        root = self._folder / _BUNDLES
        target = root / digest
        if target.is_dir():
            try:
                return _mark_used(target, self._open(target, trusted_keys))
            except BundleError:
                # The disk has damaged it: fetch it again.
                _remove(target)

        def unpack(part: Path) -> Bundle:
            bundle = self._open(part, trusted_keys, root)
            # A genuine bundle of the same publisher, but not the one of the plan.
            if bundle.digest != digest:
                _remove(bundle.folder)
                raise DigestError(f"bundle: asked for {digest}, the server sent {bundle.digest}")
            part.unlink()
            return bundle

        part = self._folder / _PARTS / f"{digest}.bundle"
        return _mark_used(target, _fetch(f"/v1/bundles/{digest}", part, limit, download, unpack))

    def _open(self, path: Path, trusted_keys: Sequence[bytes], root: Path | None = None) -> Bundle:
        return open_bundle(path, trusted_keys, root, allow_development=self._allow_development)

    def weights(self, digest: str, download: Download, limit: int) -> dict[str, np.ndarray]:
        """The tensors of the safetensors file with this SHA-256, read-only and mapped.

        Raises DigestError, TensorLayoutError, or what `download` raises.
        """
        target = self._folder / _BLOBS / digest

        def verify(part: Path) -> None:
            actual = _sha256(part)
            if actual != digest:
                raise DigestError(f"weights: asked for {digest}, the server sent {actual}")
            # The contents before the name: so after a power cut the name stands for a whole file.
            sync_file(part)
            publish(part, target)

        # Hashed at each use: cheap flash loses bits, and training with a wrong weight raises no error.
        if not target.exists() or _sha256(target) != digest:
            _fetch(f"/v1/blobs/{digest}", self._folder / _PARTS / digest, limit, download, verify)
        return _mark_used(target, read_weights(target, limit))

    def read(self, digest: str) -> bytes:
        """The bytes of the weights with this SHA-256, which are here. Raises DigestError if they are damaged."""
        data = (self._folder / _BLOBS / digest).read_bytes()
        if hashlib.sha256(data).hexdigest() != digest:
            raise DigestError(f"weights {digest}: damaged on the disk")
        return data

    def find(self, digest: str) -> dict[str, np.ndarray] | None:
        """The weights with this SHA-256; None if they are not here, or damaged."""
        target = self._folder / _BLOBS / digest
        if not target.exists() or _sha256(target) != digest:
            return None
        try:
            return read_weights(target)
        except BundleError:
            return None

    def prune(self, keep: Collection[str] = ()) -> None:
        """Remove the least recently used entries until the rest fits; those named in `keep` stay in any case."""
        entries = [
            (path.stat().st_mtime_ns, _size(path), path)
            for name in (_BUNDLES, _BLOBS, _PARTS)
            for path in (self._folder / name).iterdir()
        ]
        total = sum(size for _, size, _ in entries) + _size(self._folder / _PIECES)
        # `_mark_used` sets the modification time, so the least recently used come first.
        for _, size, path in sorted(entries, key=lambda entry: entry[:2]):
            if total <= self._max_bytes:
                break
            if path.name not in keep:
                _remove(path)
                total -= size


def _fetch(url: str, part: Path, limit: int, download: Download, check: Callable[[Path], T]) -> T:
    # A wrong file is fetched once more if it contains bytes from an earlier attempt or from other files, which may be
    # what is wrong. A file that the server has just sent as a whole would be the same again.
    resumed = part.exists()
    resumed = bool(download(url, part, limit)) or resumed
    try:
        return check(part)
    except BundleError:
        part.unlink(missing_ok=True)
        if not resumed:
            raise
    download(url, part, limit)
    try:
        return check(part)
    except BundleError:
        part.unlink(missing_ok=True)
        raise


def _mark_used(path: Path, value: T) -> T:
    os.utime(path)
    return value


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir()) if path.is_dir() else path.stat().st_size


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
