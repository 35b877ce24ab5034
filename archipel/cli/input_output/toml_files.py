"""Read files in TOML."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from archipel.errors import CommandError


def read_toml(file: Path) -> dict[str, Any]:
    """The table in `file`. Raises CommandError that names file and line where it is not TOML."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise CommandError(f"{file}: no TOML, which is text in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise CommandError(f"{file}: {error}") from None
