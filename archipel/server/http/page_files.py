"""The files of a built page: found by name in one folder, with their types, codings and times in caches."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath

from flask import Response, request

from archipel.server.http.sending import PART_BYTES, in_time, parts_of

INDEX = "index.html"
COMPRESSED = ".gz"
"""NAME.gz is served as NAME: as it is to clients that accept gzip, and unpacked to others."""
YEAR_SECONDS = 365 * 24 * 3600

# Not from the tables of the operating system, which differ: with nosniff a wrong type leaves the page empty.
CONTENT_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".css": "text/css",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".wasm": "application/wasm",
    ".webp": "image/webp",
    ".txt": "text/plain",
}
OTHER_TYPE = "application/octet-stream"
HASHED = re.compile(r"assets/.+-[0-9A-Za-z_-]{8}\.\w+")
"""Names with eight characters of a digest, which Vite writes into them: the content of such a file never changes."""


@dataclass(frozen=True)
class PageFile:
    """A file as it is sent. `packed`: the bytes at `path` are gzip's; `unpack`: they are unpacked on the way."""

    name: str
    path: Path
    packed: bool
    unpack: bool

    @property
    def size(self) -> int:
        """How many bytes are sent."""
        if not self.unpack:
            return self.path.stat().st_size
        with self.path.open("rb") as file:
            # gzip ends with the size of what it holds, which for one member below 4 GiB is all of it.
            file.seek(-4, os.SEEK_END)
            return int.from_bytes(file.read(4), "little")

    def parts(self) -> Iterator[bytes]:
        """The bytes that are sent, PART_BYTES at a time, so that no reader takes more memory than that."""
        with gzip.open(self.path) if self.unpack else self.path.open("rb") as file:
            while part := file.read(PART_BYTES):
                yield part


class PageFiles:
    """The files of one folder. A name from a request is looked up among them, and is never made part of a path."""

    def __init__(self, folder: Path, *, stall_seconds: float) -> None:
        self._folder = folder
        self._stall_seconds = stall_seconds
        self._etags: dict[tuple[str, int, int], str] = {}

    def files(self) -> dict[str, Path]:
        """Every plain file by its name in URLs, without links. Empty if the page was not built."""
        paths = {}
        for parent, _, names in os.walk(self._folder):
            for name in names:
                path = Path(parent, name)
                # A link could lead out of the folder, to any file of this machine.
                if not path.is_symlink() and path.is_file():
                    paths[path.relative_to(self._folder).as_posix()] = path
        return paths

    @property
    def built(self) -> bool:
        return INDEX in self.files()

    def find(self, name: str) -> PageFile | None:
        """The file as the current request can read it."""
        files = self.files()
        packed = name not in files
        path = files.get(name + COMPRESSED if packed else name)
        if path is None:
            return None
        return PageFile(name, path, packed, unpack=packed and not request.accept_encodings["gzip"])

    def send(self, file: PageFile) -> Response:
        """The answer to the current request; 304 if the client has the file already."""
        response = Response(mimetype=CONTENT_TYPES.get(PurePosixPath(file.name).suffix, OTHER_TYPE))
        # Two representations of one file must not have the same ETag, or a cache would mix them up.
        response.set_etag(f"{self._digest(file.path)}-plain" if file.unpack else self._digest(file.path))
        if file.packed and not file.unpack:
            response.headers["Content-Encoding"] = "gzip"
        response.headers["Vary"] = "Accept-Encoding"
        fixed = HASHED.fullmatch(file.name) is not None
        response.headers["Cache-Control"] = f"public, max-age={YEAR_SECONDS}, immutable" if fixed else "no-cache"
        response.content_length = file.size
        response.make_conditional(request.environ)
        if response.status_code == 200 and request.method != "HEAD":
            response.response = in_time(file.parts(), self._stall_seconds)
        return response

    def send_made(self, name: str, content: bytes) -> Response:
        """The same for a file that lies nowhere, of this content."""
        response = Response(mimetype=CONTENT_TYPES.get(PurePosixPath(name).suffix, OTHER_TYPE))
        packed = bool(request.accept_encodings["gzip"])
        body = _pack(content) if packed else content
        response.set_etag(hashlib.sha256(body).hexdigest())
        if packed:
            response.headers["Content-Encoding"] = "gzip"
        response.headers["Vary"] = "Accept-Encoding"
        response.headers["Cache-Control"] = "no-cache"
        response.content_length = len(body)
        response.make_conditional(request.environ)
        if response.status_code == 200 and request.method != "HEAD":
            response.response = in_time(parts_of(body), self._stall_seconds)
        return response

    def _digest(self, path: Path) -> str:
        """SHA-256 of the content, remembered until size or time of the file change."""
        stat = path.stat()
        key = (str(path), stat.st_mtime_ns, stat.st_size)
        if key not in self._etags:
            with path.open("rb") as file:
                self._etags[key] = hashlib.file_digest(file, "sha256").hexdigest()
        return self._etags[key]


@lru_cache(8)
def _pack(content: bytes) -> bytes:
    return gzip.compress(content, 6, mtime=0)
