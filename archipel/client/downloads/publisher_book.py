"""What publishers state about their bundles: for which populations, until when, and which bundles they replace.

The device checks it before a round and before it adopts a version; a version that runs already goes on predicting. The
greatest `sequence` of a publisher's model is on disk before the device uses that bundle.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from archipel.bundle import Bundle
from archipel.client.memory.stored import read_stored
from archipel.durable import write_durably
from archipel.errors import ClientError
from archipel.protocol.messages import Digest, Whole
from archipel.protocol.policy import check_validity
from archipel.protocol.sealed import encode

MAX_NAMES = 1024
_MAX_BYTES = 256 << 10


class Sequences(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file: the greatest sequence that was seen, by the SHA-256 of publisher key and model name."""

    seen: Annotated[dict[Digest, Whole], Meta(max_length=MAX_NAMES)] = {}


class PublisherBook:
    """The greatest sequences, in the file `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def check(self, bundle: Bundle, population: str, now: float) -> None:
        """Raises PolicyError for a bundle that is for other populations, has expired by `now` (Unix seconds by this
        device's clock) or was replaced; ClientError if its sequence cannot be recorded."""
        manifest = bundle.manifest
        # First what needs no file.
        check_validity(manifest, population, now)
        seen = self._stored()
        name = hashlib.sha256(bundle.publisher + manifest.name.encode()).hexdigest()
        known = seen.get(name, 0)
        check_validity(manifest, population, now, least=known)
        if manifest.sequence > known:
            if name not in seen and len(seen) >= MAX_NAMES:
                raise ClientError(f"{self._path}: more than {MAX_NAMES} models with a sequence; remove the file")
            write_durably(self._path, encode(Sequences(seen={**seen, name: manifest.sequence})))

    def _stored(self) -> dict[str, int]:
        remedy = "remove it, and bundles that were replaced are taken again"
        sequences = read_stored(self._path, _MAX_BYTES, "publishers' sequences", Sequences, remedy)
        return {} if sequences is None else sequences.seen
