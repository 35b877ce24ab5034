"""Read files in TOML, and put a single setting into what was read."""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from archipel.errors import CommandError
from archipel.library_errors import one_line


def read_toml(file: Path) -> dict[str, Any]:
    """The table in `file`. Raises CommandError that names file and line where it is not TOML."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise CommandError(f"{file}: no TOML, which is text in UTF-8") from None
    except RecursionError:
        raise CommandError(f"{file}: nested too deeply for a file of settings") from None
    except ValueError as error:
        # tomllib's own error, or Python's for a number with thousands of digits.
        raise CommandError(f"{file}: {one_line(error)}") from None


def put_setting(
    table: dict[str, Any], setting: str, fields: Collection[str], example: str, otherwise: str | None = None
) -> None:
    """Put a setting KEY=VALUE, as the option --set has it, in place of the table's own.

    Arguments:
        table: is changed.
        setting: the key has a dot before the name in each inner table, or its number from 0 on in a list of tables; the
            value is one of TOML, or a text as it is.
        fields: the names that the file may have.
        example: settings that the error shows.
        otherwise: the inner table that a key is of which does not begin with one of `fields`.

    Raises CommandError.
    """
    key, equals, text = setting.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise CommandError(f"--set {setting}: expected KEY=VALUE, such as {example}")
    if otherwise is not None and (parts[0] not in fields or parts == [otherwise]):
        parts = [otherwise, *parts]
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text  # a word without quotation marks, which a shell takes away
    at = table
    while len(parts) > 1:
        part = parts.pop(0)
        inner = at.setdefault(part, {})
        if isinstance(inner, str):  # optimizer.lr where the file has optimizer = "adam"
            inner = at[part] = {"name": inner}
        if isinstance(inner, list) and len(parts) > 1:
            number = parts.pop(0)
            if number not in map(str, range(len(inner))):
                raise CommandError(f"--set {setting}: {part} has no {number}, but 0 to {len(inner) - 1}")
            inner = inner[int(number)]
        if not isinstance(inner, dict):
            raise CommandError(f"--set {setting}: {part} is no table")
        at = inner
    at[parts[0]] = value
