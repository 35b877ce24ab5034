"""Folders of files: a folder for each class, or files alone."""

from __future__ import annotations

import os
from pathlib import Path

from archipel.errors import DatasetError

MAX_FILES = 50_000_000


class ClassFolder:
    """The files of these kinds in a folder, in the order of their names.

    path     the folder
    files    the files, relative to it
    labels   the number of each file's class; empty where there are no classes
    classes  the names of the folders in it, sorted; the files in these and below belong to the class

    Raises DatasetError for a folder without such files, or with files both in it and in folders. Hidden files and
    folders do not count, links to folders are not followed.
    """

    def __init__(self, path: Path, suffixes: tuple[str, ...]) -> None:
        self.path = path
        if not path.is_dir():
            raise DatasetError(f"{path}: No such folder; give one with a folder for each class, or with files")
        alone = self._find(path, suffixes, deep=False)
        names = sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not entry.name.startswith("."))
        found = {name: self._find(path / name, suffixes, deep=True) for name in names}
        found = {name: files for name, files in found.items() if files}
        if alone and found:
            raise DatasetError(
                f"{path}: files in the folder ({alone[0]}) and in folders in it ({next(iter(found))}); "
                "put each file into the folder of its class"
            )
        if not alone and not found:
            raise DatasetError(f"{path}: no files that end with {', '.join(suffixes)} in it or in folders in it")
        self.classes = tuple(found)
        self.files: list[str] = alone or [file for files in found.values() for file in files]
        self.labels: list[int] = [label for label, files in enumerate(found.values()) for _ in files]

    def _find(self, folder: Path, suffixes: tuple[str, ...], deep: bool) -> list[str]:
        found: list[str] = []
        for base, folders, files in os.walk(folder):
            folders[:] = sorted(name for name in folders if not name.startswith(".")) if deep else []
            inside = os.path.relpath(base, self.path)
            found.extend(
                os.path.normpath(os.path.join(inside, name))
                for name in sorted(files)
                if not name.startswith(".") and name.lower().endswith(suffixes)
            )
            if len(found) > MAX_FILES:
                raise DatasetError(f"{folder}: more than {MAX_FILES} files; convert them to a record file in parts")
        return found
