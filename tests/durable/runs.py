"""What a run of tests/durable/victim.py left behind, and what a power cut would have made of it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

Tree = dict[str, str]
"""Contents by path below the folder; of a folder, whose path ends with a slash, the empty text."""

UNKNOWN = "?"
"""Contents that were never synced: after a power cut the file may hold anything."""


@dataclass(frozen=True)
class Run:
    """`calls` of a whole run; `killed[n]` is what is there after a kill before call n, the last of it after the end."""

    calls: list[dict[str, str]]
    killed: list[Tree]

    @property
    def said(self) -> list[str]:
        """The calls as text, such as `replace .file.t1.tmp file`."""
        return [" ".join((each["name"], each["path"], *([each["to"]] if "to" in each else []))) for each in self.calls]


def run(action: str, template: Path, work: Path) -> Run:
    """Do `action` in copies of `template`, killed before each of its calls, and once to the end."""
    work.mkdir()
    victim = Path(__file__).with_name("victim.py")
    done = subprocess.run(
        [sys.executable, str(victim), action, str(template), str(work)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return Run(json.loads(done.stdout), [tree(folder) for folder in sorted(work.iterdir())])


def tree(folder: Path) -> Tree:
    """What is in the folder."""
    return {
        path.relative_to(folder).as_posix() + ("/" if path.is_dir() else ""): (
            "" if path.is_dir() else path.read_bytes().decode(errors="replace")
        )
        for path in sorted(folder.rglob("*"))
    }


def fill(folder: Path, contents: Tree) -> Path:
    """Make the folder with these contents."""
    folder.mkdir()
    for name, text in contents.items():
        path = folder / name
        if name.endswith("/"):
            path.mkdir()
        else:
            path.write_text(text)
    return folder


class Disk:
    """A disk that keeps what was synced. It is told the calls of a run; a power cut may come after any of them.

    Every file and folder has a number. What lies in a folder, and what a file holds, is there twice: as the process
    sees it, and as it was when it was last synced.
    """

    def __init__(self, start: Tree) -> None:
        self._next = 1
        self._seen: dict[int, dict[str, int]] = {0: {}}
        self._synced: dict[int, dict[str, int]] = {0: {}}
        self._data: dict[int, str] = {}
        for name, text in start.items():
            number = self._make(name.rstrip("/"), is_folder=name.endswith("/"))
            if not name.endswith("/"):
                self._data[number] = text
        self._synced = {number: dict(entries) for number, entries in self._seen.items()}

    def do(self, call: dict[str, str]) -> None:
        name, path = call["name"], call["path"]
        if "fails" in call:
            return
        if name == "mkdir" or (name == "open" and "makes" in call and self._find(path) is None):
            self._make(path, is_folder=name == "mkdir")
        elif name == "fsync":
            number = self._find(path)
            assert number is not None
            if number in self._seen:
                self._synced[number] = dict(self._seen[number])
            else:
                self._data[number] = call["data"]
        elif name in ("write", "pwrite"):
            number = self._find(path)
            assert number is not None
            self._data[number] = UNKNOWN
        elif name in ("replace", "rename", "link"):
            found = self._find(path) if name == "link" else self._take(path)
            assert found is not None
            number = found
            parent, last = self._parent(call["to"])
            self._seen[parent][last] = number
        elif name in ("unlink", "rmdir"):
            self._take(path)

    def after_power_cut(self, *, names_kept: bool) -> Tree:
        """The worst that may be there: only names that were synced, or all names as the process saw them; of the files'
        contents only what was synced."""
        entries = self._seen if names_kept else self._synced
        found: Tree = {}

        def walk(number: int, before: str) -> None:
            for name, each in sorted(entries[number].items()):
                if each in entries:
                    found[f"{before}{name}/"] = ""
                    walk(each, f"{before}{name}/")
                else:
                    found[before + name] = self._data.get(each, UNKNOWN)

        walk(0, "")
        return found

    def _make(self, path: str, *, is_folder: bool) -> int:
        parent, last = self._parent(path)
        number = self._seen[parent][last] = self._next
        self._next += 1
        if is_folder:
            self._seen[number], self._synced[number] = {}, {}
        return number

    def _take(self, path: str) -> int:
        parent, last = self._parent(path)
        return self._seen[parent].pop(last)

    def _parent(self, path: str) -> tuple[int, str]:
        before, _, last = path.rpartition("/")
        number = self._find(before or ".")
        assert number is not None, path
        return number, last

    def _find(self, path: str) -> int | None:
        number: int | None = 0
        for name in path.split("/") if path != "." else ():
            number = None if number is None else self._seen[number].get(name)
        return number
