"""What a stored bundle tells of itself to people: its size and its model card."""

from __future__ import annotations

import zipfile
from pathlib import Path

from archipel.bundle.card import CARD_FILE, MAX_CARD_BYTES, ModelCard, decode_card
from archipel.errors import ArchipelError
from archipel.server.dashboard.desk import Desk
from archipel.server.http.api.bundles import find_bundle_file


def look_into(desk: Desk, digest: str) -> tuple[int | None, ModelCard | None]:
    """Bytes of the bundle's file, and its card if it has one; None for what the person may not have or is gone."""
    try:
        file = find_bundle_file(desk.call("download_bundle"), digest)
        with desk.services.blobs.open(file) as path:
            return path.stat().st_size, _read_card(path)
    except (ArchipelError, OSError, zipfile.BadZipFile):
        # A page about a version says the rest also where its bundle cannot be read.
        return None, None


def _read_card(path: Path) -> ModelCard | None:
    with zipfile.ZipFile(path) as archive:
        if CARD_FILE not in archive.namelist() or archive.getinfo(CARD_FILE).file_size > MAX_CARD_BYTES:
            return None
        return decode_card(archive.read(CARD_FILE))
