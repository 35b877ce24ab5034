"""Results that are made once: a JSON file each, named by what decides them."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from archipel.lite_runtime.durable import write_durably


def digest(*parts: object) -> str:
    """Sixteen hexadecimal digits that change with any of `parts`: bytes, or what JSON can hold."""
    found = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else json.dumps(part, sort_keys=True).encode()
        found.update(len(data).to_bytes(8, "little") + data)
    return found.hexdigest()[:16]


class Cells:
    """The finished results of a study, in a folder. Stopped anywhere, a study goes on with the first that is missing.

    `seconds` is what the results asked for took to make. A result does not follow the program's own changes: remove
    the folder to measure a changed archipel.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder = folder
        self.seconds = 0.0
        self._say = say
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, key: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What `make` gave for this `key`, JSON-able both; made now if it was not before."""
        path = self.folder / f"{name}-{digest(key)}.json"
        if path.exists():
            kept: dict[str, Any] = json.loads(path.read_text())
        else:
            self._say(name)
            started = time.monotonic()
            result = make()
            # What was stopped and went on took longer than this last time.
            kept = {"key": dict(key), **result, "wall": max(time.monotonic() - started, result.get("seconds", 0.0))}
            write_durably(path, json.dumps(kept, indent=1).encode())
        self.seconds += kept["wall"]
        return kept
