"""After a power cut at any step, on a disk that keeps no more than what was synced, and on one that keeps the names of
files but not what was written to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.durable.runs import UNKNOWN, Disk, Tree, fill, run

Promise = Callable[[Tree, bool], bool]
"""Whether what is there after a power cut is as promised; the flag says whether the function had returned."""


def one_of(name: str, old: str | None, new: str | None) -> Promise:
    """The file is the old or the new one as a whole (None: not there), and the new one in the end."""
    return lambda there, returned: there.get(name) in ((new,) if returned else (old, new))


def folder_of(name: str, old: Tree, new: Tree, *, gap: bool = False) -> Promise:
    """The same for a folder; with `gap` it may be missing before the end."""

    def holds(there: Tree, returned: bool) -> bool:
        found = {path: text for path, text in there.items() if path.startswith(f"{name}/")}
        return found == new or (not returned and (found == old or (gap and not found)))

    return holds


OLD: Tree = {"file": "old"}
MADE: Tree = {"made/": "", "made/deep/": "", "made/deep/two": "2", "made/one": "1"}
KEPT: Tree = {"kept/": "", "kept/one": "old"}
CASES: dict[str, tuple[str, Tree, Promise]] = {
    "write over": ("write", OLD, one_of("file", "old", "new")),
    "write": ("write", {}, one_of("file", None, "new")),
    "replacing": ("replacing", OLD, one_of("file", "old", "new")),
    "publish": ("publish", {**OLD, "parts/": "", "parts/part": "new"}, one_of("file", "old", "new")),
    # Under its name before it is synced: until the end it may hold anything.
    "publish_unsynced": (
        "publish_unsynced", {"parts/": ""}, lambda there, returned: not returned or there["file"] == "new",
    ),
    "publish_unsynced over": ("publish_unsynced", {**OLD, "parts/": ""}, one_of("file", "old", "new")),
    "remove": ("remove", OLD, one_of("file", "old", None)),
    # Under its name from the start: until the end it may hold anything.
    "create": ("create", {}, lambda there, returned: not returned or there == {"made": "new"}),
    "creating": ("creating", {}, lambda there, returned: not returned or there == {"made": "new"}),
    "overwrite": ("overwrite", OLD, lambda there, returned: not returned or there["file"] not in ("old", UNKNOWN)),
    "make_folder": ("make_folder", {}, lambda there, returned: not returned or there == {"a/": "", "a/b/": ""}),
    "creating_folder": ("creating_folder", {}, folder_of("made", {}, MADE)),
    "replace_folder": (
        "replace_folder", KEPT, folder_of("kept", KEPT, {"kept/": "", "kept/one": "new"}, gap=True),
    ),
}  # fmt: skip


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("case", CASES)
def test_power_cut_at_any_step(tmp_path: Path, case: str) -> None:
    action, start, promise = CASES[case]
    calls = run(action, fill(tmp_path / "template", start), tmp_path / "work").calls
    assert calls
    for number in range(len(calls) + 1):
        disk = Disk(start)
        for call in calls[:number]:
            disk.do(call)
        for names_kept in (False, True):
            there = disk.after_power_cut(names_kept=names_kept)
            assert promise(there, number == len(calls)), (number, names_kept, there)


def test_the_disk_forgets_what_was_not_synced() -> None:
    """A file renamed without a sync of it or of its folder, as some programs do it, is lost or empty."""
    disk = Disk({"file": "old"})
    for call in ({"name": "open", "path": "part", "makes": "yes"}, {"name": "write", "path": "part"},
                 {"name": "replace", "path": "part", "to": "file"}):  # fmt: skip
        disk.do(call)
    assert disk.after_power_cut(names_kept=False) == {"file": "old"}
    assert disk.after_power_cut(names_kept=True) == {"file": UNKNOWN}
    # Synced only after it was renamed: until then it may be empty.
    disk.do({"name": "fsync", "path": "file", "data": "new"})
    assert disk.after_power_cut(names_kept=False) == {"file": "old"}
    assert disk.after_power_cut(names_kept=True) == {"file": "new"}
    disk.do({"name": "fsync", "path": "."})
    assert disk.after_power_cut(names_kept=False) == {"file": "new"}


def test_a_file_synced_in_a_folder_that_is_not() -> None:
    disk = Disk({})
    for call in ({"name": "mkdir", "path": "a"}, {"name": "open", "path": "a/one", "makes": "yes"},
                 {"name": "fsync", "path": "a/one", "data": "1"}):  # fmt: skip
        disk.do(call)
    assert disk.after_power_cut(names_kept=False) == {}
    disk.do({"name": "fsync", "path": "."})
    assert disk.after_power_cut(names_kept=False) == {"a/": ""}
    disk.do({"name": "fsync", "path": "a"})
    assert disk.after_power_cut(names_kept=False) == {"a/": "", "a/one": "1"}
