"""What a stored bundle tells of itself to people: its size, the work and memory that it states, and its model card."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

from archipel.bundle import Limits, decode_manifest
from archipel.bundle.card import CARD_FILE, MAX_CARD_BYTES, ModelCard, decode_card
from archipel.bundle.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES
from archipel.errors import ArchipelError
from archipel.server.dashboard.desk import Desk
from archipel.server.http.api.bundles import find_bundle_file


@dataclass(frozen=True)
class Content:
    """What a page tells of a bundle's file: its bytes, what the publisher stated of work and memory, and the card."""

    size: int | None = None
    limits: Limits | None = None
    card: ModelCard | None = None


def look_into(desk: Desk, digest: str) -> Content:
    """Of the bundle's file; nothing where the person may not have it, or it is gone."""
    try:
        file = find_bundle_file(desk.call("download_bundle"), digest)
        with desk.services.blobs.open(file) as path:
            return _read(path)
    except (ArchipelError, OSError, zipfile.BadZipFile):
        # A page about a version says the rest also where its bundle cannot be read.
        return Content()


def _read(path: Path) -> Content:
    with zipfile.ZipFile(path) as archive:
        card = _member(archive, CARD_FILE, MAX_CARD_BYTES)
        manifest = _member(archive, MANIFEST_FILE, MAX_MANIFEST_BYTES)
        return Content(
            path.stat().st_size,
            None if manifest is None else decode_manifest(manifest).limits,
            None if card is None else decode_card(card),
        )


def _member(archive: zipfile.ZipFile, name: str, most: int) -> bytes | None:
    if name not in archive.namelist() or archive.getinfo(name).file_size > most:
        return None
    return archive.read(name)
