"""Results that are made once: a JSON file each, named by what decides them."""

from __future__ import annotations

import hashlib
import json
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

    A result does not follow the program's own changes: remove the folder to measure a changed archipel.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder = folder
        self._say = say
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, key: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What `make` gave for this `key`, JSON-able both; made now if it was not before."""
        path = self.folder / f"{name}-{digest(key)}.json"
        if path.exists():
            kept: dict[str, Any] = json.loads(path.read_text())
            return kept
        self._say(name)
        result = make()
        write_durably(path, json.dumps({"key": key, **result}, indent=1).encode())
        return {"key": dict(key), **result}
