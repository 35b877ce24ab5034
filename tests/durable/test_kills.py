"""Killed between any two steps: the calls of each function as they must be, and what is there after a kill in between.

`kill -9` before each call; the lists are written by hand. In names t1, t2 stand for what is drawn at random.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.durable.runs import Run, Tree, fill, run

OLD: Tree = {"file": "old"}


@pytest.fixture
def ran(tmp_path: Path) -> Callable[[str, Tree], Run]:
    return lambda action, start: run(action, fill(tmp_path / "template", start), tmp_path / "work")


def test_writing(ran: Callable[[str, Tree], Run]) -> None:
    found = ran("write", OLD)
    assert found.said == [
        "open .file.t1.tmp",
        "fsync .file.t1.tmp",
        "replace .file.t1.tmp file",
        "open .",
        "fsync .",
    ]
    assert found.killed == [
        {"file": "old"},
        {"file": "old", ".file.t1.tmp": "new"},
        {"file": "old", ".file.t1.tmp": "new"},
        {"file": "new"},
        {"file": "new"},
        {"file": "new"},
    ]


def test_writing_a_file_that_is_not_there(ran: Callable[[str, Tree], Run]) -> None:
    assert ran("write", {}).killed == [
        {}, {".file.t1.tmp": "new"}, {".file.t1.tmp": "new"}, {"file": "new"}, {"file": "new"}, {"file": "new"},
    ]  # fmt: skip


def test_replacing_in_parts(ran: Callable[[str, Tree], Run]) -> None:
    found = ran("replacing", OLD)
    assert found.said == [
        "open .file.t1.tmp",
        "fsync .file.t1.tmp",  # the block's own, between its parts
        "fsync .file.t1.tmp",
        "replace .file.t1.tmp file",
        "open .",
        "fsync .",
    ]
    assert found.killed == [
        {"file": "old"},
        {"file": "old", ".file.t1.tmp": "ne"},
        {"file": "old", ".file.t1.tmp": "new"},
        {"file": "old", ".file.t1.tmp": "new"},
        {"file": "new"},
        {"file": "new"},
        {"file": "new"},
    ]


def test_creating(ran: Callable[[str, Tree], Run]) -> None:
    found = ran("create", OLD)
    assert found.said == ["open made", "fsync made", "open .", "fsync ."]
    made = {"file": "old", "made": "new"}
    assert found.killed == [{"file": "old"}, made, made, made, made]


def test_creating_in_parts(ran: Callable[[str, Tree], Run]) -> None:
    found = ran("creating", {})
    assert found.said == ["open made", "fsync made", "fsync made", "open .", "fsync ."]
    assert found.killed == [{}, {"made": "ne"}, {"made": "new"}, {"made": "new"}, {"made": "new"}, {"made": "new"}]


def test_publishing_from_another_folder(ran: Callable[[str, Tree], Run]) -> None:
    found = ran("publish", {"file": "old", "parts/": "", "parts/part": "new"})
    assert found.said == ["replace parts/part file", "open .", "fsync ."]
    done = {"file": "new", "parts/": ""}
    assert found.killed == [{"file": "old", "parts/": "", "parts/part": "new"}, done, done, done]


def test_publishing_what_is_not_synced(ran: Callable[[str, Tree], Run]) -> None:
    found = ran("publish_unsynced", {"parts/": ""})
    assert found.said[2:] == [
        "link parts/part file", "unlink parts/part", "open file", "fsync file", "open .", "fsync .",
    ]  # fmt: skip
    both, done = {"file": "new", "parts/": "", "parts/part": "new"}, {"file": "new", "parts/": ""}
    assert found.killed[2:] == [{"parts/": "", "parts/part": "new"}, both, done, done, done, done, done]


def test_publishing_what_is_not_synced_over_a_file(ran: Callable[[str, Tree], Run]) -> None:
    """Which somebody may rely on: it stays until the new one is on the disk."""
    found = ran("publish_unsynced", {**OLD, "parts/": ""})
    assert found.said[2:] == [
        "link parts/part file", "open parts/part", "fsync parts/part", "replace parts/part file", "open .", "fsync .",
    ]  # fmt: skip
    before, done = {"file": "old", "parts/": "", "parts/part": "new"}, {"file": "new", "parts/": ""}
    assert found.killed[2:] == [before, before, before, before, done, done, done]


def test_removing(ran: Callable[[str, Tree], Run]) -> None:
    found = ran("remove", OLD)
    assert found.said == ["unlink file", "open .", "fsync ."]
    assert found.killed == [{"file": "old"}, {}, {}, {}]


def test_overwriting(ran: Callable[[str, Tree], Run]) -> None:
    found = ran("overwrite", {"file": "secret, 32 bytes of it, in words"})
    assert found.said == ["open file", "pwrite file", "fsync file"]
    assert [each["file"].startswith("secret") for each in found.killed] == [True, True, False, False]
    assert not any("secret" in each["file"] or "words" in each["file"] for each in found.killed[2:])


def test_making_folders(ran: Callable[[str, Tree], Run]) -> None:
    found = ran("make_folder", {})
    assert found.said == ["mkdir a", "open .", "fsync .", "mkdir a/b", "open a", "fsync a"]
    one, both = {"a/": ""}, {"a/": "", "a/b/": ""}
    assert found.killed == [{}, one, one, one, both, both, both]


def test_making_a_folder_in_one_that_is_there(ran: Callable[[str, Tree], Run]) -> None:
    assert ran("make_folder", {"a/": ""}).said == ["mkdir a/b", "open a", "fsync a"]


def test_making_a_folder_that_is_there(ran: Callable[[str, Tree], Run]) -> None:
    assert ran("make_folder", {"a/": "", "a/b/": ""}).said == []


def test_creating_a_folder(ran: Callable[[str, Tree], Run]) -> None:
    found = ran("creating_folder", OLD)
    temporary = ".made.t1.tmp"
    assert found.said[:6] == [
        f"mkdir {temporary}",
        f"open {temporary}/one",
        f"write {temporary}/one",
        f"mkdir {temporary}/deep",
        f"open {temporary}/deep/two",
        f"write {temporary}/deep/two",
    ]
    # Everything in it, in any order, then it itself.
    synced = [each for each in found.said[6:-3] if each.startswith("fsync")]
    assert sorted(synced) == [
        f"fsync {temporary}", f"fsync {temporary}/deep", f"fsync {temporary}/deep/two", f"fsync {temporary}/one",
    ]  # fmt: skip
    assert found.said[-4:] == [f"fsync {temporary}", f"replace {temporary} made", "open .", "fsync ."]
    whole = {"file": "old", "made/": "", "made/deep/": "", "made/deep/two": "2", "made/one": "1"}
    at = found.said.index(f"replace {temporary} made")
    for number, each in enumerate(found.killed):
        there = {name: text for name, text in each.items() if not name.startswith(temporary)}
        assert there == (OLD if number <= at else whole), number
        assert (there != each) == (0 < number <= at), number


def test_replacing_a_folder(ran: Callable[[str, Tree], Run]) -> None:
    found = ran("replace_folder", {"kept/": "", "kept/one": "old"})
    assert found.said[found.said.index("replace kept .kept.t2.tmp") :][:4] == [
        "replace kept .kept.t2.tmp", "replace .kept.t1.tmp kept", "open .", "fsync .",
    ]  # fmt: skip
    first = found.said.index("replace kept .kept.t2.tmp")
    kept = [each.get("kept/one") for each in found.killed]
    assert kept == ["old"] * (first + 1) + [None] + ["new"] * (len(found.killed) - first - 2)
    # For that moment the old and the new one lie beside it.
    assert found.killed[first + 1] == {
        ".kept.t1.tmp/": "", ".kept.t1.tmp/one": "new", ".kept.t2.tmp/": "", ".kept.t2.tmp/one": "old",
    }  # fmt: skip
    assert found.killed[-1] == {"kept/": "", "kept/one": "new"}


def test_sweeping(ran: Callable[[str, Tree], Run]) -> None:
    """Killed meanwhile it has removed some of it; never anything else."""
    mine = {"file": "old", ".file": "hidden", ".tmp": "x", ".file.tmp": "y", "a.b.tmp": "z"}
    found = ran("sweep", {**mine, ".file.t1.tmp": "half", ".made.t2.tmp/": "", ".made.t2.tmp/one": "1"})
    assert sorted(each for each in found.said if not each.startswith("open")) == [
        "rmdir .made.t2.tmp", "unlink .file.t1.tmp", "unlink .made.t2.tmp/one",
    ]  # fmt: skip
    for each in found.killed:
        assert {name: text for name, text in each.items() if name in mine} == mine
    assert found.killed[-1] == mine


def test_locking(ran: Callable[[str, Tree], Run]) -> None:
    found = ran("lock", {})
    assert found.said == ["open lock"]
    assert found.killed == [{}, {"lock": ""}]
