"""Looks whether a file can be written before a command works long for it."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from archipel.errors import CommandError, MissingExtraError


def check_target(file: Path | None, module: str | None = None, extra: str = "") -> None:
    """Raise CommandError for a name under which no file can be made; None is no name.

    Arguments:
        file: what the command will write.
        module: what it needs for that, and the `extra` with it: MissingExtraError where it is not installed.
    """
    if file is None:
        return
    folder = file.absolute().parent
    if file.is_dir():
        raise CommandError(f"{file}: is a folder; give the name of a file")
    if not folder.is_dir():
        raise CommandError(f"{file}: there is no folder {folder}; make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CommandError(f"{file}: {folder} cannot be written to; choose another folder")
    if module is not None and find_spec(module) is None:
        raise MissingExtraError(module, extra)
