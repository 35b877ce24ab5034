"""Results that are made once: a JSON file each, named by what decides them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stamp import Stamp, stamp

from archipel.durable import write_durably


def digest(*parts: object) -> str:
    """Sixteen hexadecimal digits that change with any of `parts`: bytes, or what JSON can hold."""
    found = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else json.dumps(part, sort_keys=True).encode()
        found.update(len(data).to_bytes(8, "little") + data)
    return found.hexdigest()[:16]


class Missing(Exception):
    """A result that is not there and may not be made now; the text names it."""


class Cells:
    """The finished results of a study, in a folder. Stopped anywhere, a study goes on with the first that is missing.

    Each has the stamp of the process that made it; `stamps` are those of the results asked for. With `make` False
    nothing is made: what is missing raises Missing. A result does not follow the program's own changes: remove the
    folder to measure a changed archipel.
    """

    def __init__(self, folder: Path, say: Callable[[str], None], make: bool = True) -> None:
        self.folder = folder
        self.stamps: list[Stamp] = []
        self._say = say
        self._make = make
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, key: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What `make` gave for this `key`, JSON-able both; made now if it was not before."""
        path = self.folder / f"{name}-{digest(key)}.json"
        if path.exists():
            kept: dict[str, Any] = json.loads(path.read_text())
        elif not self._make:
            raise Missing(name)
        else:
            self._say(name)
            kept = {"key": dict(key), **make(), "stamp": stamp()}
            write_durably(path, json.dumps(kept, indent=1).encode())
        self.stamps.append(kept["stamp"])
        return kept
