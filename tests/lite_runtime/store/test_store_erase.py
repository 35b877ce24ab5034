"""Erasing: what is left, which copies still open, and processes killed between any two steps."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from archipel.errors import StoreErasedError, StoreError, StoreKeyError
from archipel.lite_runtime.store.example_store import ExampleStore

KEY = bytes(range(32))


def make(folder: Path, count: int = 5) -> ExampleStore:
    store = ExampleStore.open(folder, KEY, max_age=None)
    store.add_many({"y": np.arange(count)})
    return store


def everything(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.iterdir())


def key_parts(record: bytes) -> list[bytes]:
    """Pieces of 16 bytes of all in a key file that is secret or needed: salt, nonce, sealed key, tag."""
    return [record[at : at + 16] for at in range(32, 136 - 15, 4)]


def test_nothing_is_left_and_the_folder_takes_a_new_store(tmp_path: Path) -> None:
    store = make(tmp_path)
    store.erase()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StoreError, match="is closed"):
        store.arrays()
    with ExampleStore.open(tmp_path, KEY) as fresh:
        assert len(fresh) == 0
        assert fresh.fields == {}
        assert fresh.add({"other": np.float32(1)}) == 1


def test_a_copy_of_the_database_opens_only_with_a_copy_of_the_key_file(tmp_path: Path) -> None:
    folder, copies, put_back = tmp_path / "store", tmp_path / "copies", tmp_path / "back"
    store = make(folder)
    # A backup taken while the store is in use, log and all.
    shutil.copytree(folder, copies)
    record = (copies / "store.key").read_bytes()
    store.erase()

    # With everything that was copied it opens, so what follows is not true for some other reason.
    shutil.copytree(copies, put_back)
    with ExampleStore.open(put_back, KEY, max_age=None) as whole:
        assert whole.arrays()["y"].tolist() == [0, 1, 2, 3, 4]
    shutil.rmtree(put_back)

    # Without the key file, but with the caller's key, the database, and all that is found in the folder afterwards.
    (copies / "store.key").unlink()
    left = everything(copies) + everything(folder)
    assert not any(part in left for part in key_parts(record))
    for path in copies.iterdir():
        shutil.copy(path, folder)
    with pytest.raises(StoreKeyError, match=r"cannot be read without store\.key, which is missing"):
        ExampleStore.open(folder, KEY)
    # Nor under the key file of the store that follows, with that store's id written into the copy.
    ExampleStore.destroy(folder)
    ExampleStore.open(folder, KEY).close()
    new = (folder / "store.key").read_bytes()[16:32]
    (old_name,) = {path.name.split(".")[0] for path in copies.iterdir()}
    for path in copies.iterdir():
        shutil.copy(path, folder / path.name.replace(old_name, f"examples-{new.hex()}"))
    copy = sqlite3.connect(folder / f"examples-{new.hex()}.db")
    with copy:
        copy.execute("UPDATE store SET id = ?", (new,))
    copy.close()
    with pytest.raises(StoreError, match="damaged or tampered with"):
        ExampleStore.open(folder, KEY)


def test_the_key_is_overwritten_where_it_lay(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    store = make(folder)
    # A second name for the same bytes shows what is in them after the first name is gone.
    os.link(folder / "store.key", tmp_path / "same")
    record = (tmp_path / "same").read_bytes()
    store.erase()
    after = (tmp_path / "same").read_bytes()
    assert len(after) >= len(record)
    assert not any(part in after for part in key_parts(record))
    assert b"archipel" not in after


def test_another_process_that_has_it_open_can_use_it_no_more(tmp_path: Path) -> None:
    mine, other = make(tmp_path), ExampleStore.open(tmp_path, KEY, max_age=None)
    batches = other.batches(2, shuffled=False)
    assert next(batches)["y"].tolist() == [0, 1]
    mine.erase()
    with pytest.raises(StoreErasedError, match="was erased"):
        next(batches)
    third = make(tmp_path, 3)
    with pytest.raises(StoreError, match="is closed"):
        other.add({"y": np.int64(9)})
    assert third.arrays()["y"].tolist() == [0, 1, 2]
    third.close()


def test_a_writer_that_missed_the_erase_loses_nothing_of_the_next_store(tmp_path: Path) -> None:
    late = make(tmp_path)
    ExampleStore.destroy(tmp_path)
    third = make(tmp_path, 3)
    third.add({"y": np.int64(3)})
    with pytest.raises(StoreErasedError):
        late.add({"y": np.int64(9)})
    third.add({"y": np.int64(4)})
    with ExampleStore.open(tmp_path, KEY) as again:
        assert again.arrays()["y"].tolist() == [0, 1, 2, 3, 4]
    third.close()
    with ExampleStore.open(tmp_path, KEY) as again:
        assert len(again) == 5


def test_destroying_needs_no_key_and_touches_nothing_else(tmp_path: Path) -> None:
    make(tmp_path).close()
    (tmp_path / "store.key").unlink()
    mine = ("notes.txt", "examples.db", ".notes.tmp", "examples-1.db")
    for name in mine:
        (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(StoreKeyError, match=r"ExampleStore\.destroy"):
        ExampleStore.open(tmp_path, KEY)
    for _ in range(2):
        ExampleStore.destroy(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(mine)
    ExampleStore.destroy(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_a_damaged_store_can_be_erased(tmp_path: Path) -> None:
    make(tmp_path).close()
    for path in tmp_path.iterdir():
        path.write_bytes(b"damaged")
    ExampleStore.destroy(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_overwriting_follows_no_link(tmp_path: Path) -> None:
    folder, target = tmp_path / "store", tmp_path / "target"
    make(folder).close()
    target.write_bytes(b"not the store's")
    (folder / "erasing.key").symlink_to(target)
    with pytest.raises(StoreError, match="store"):
        ExampleStore.open(folder, KEY)
    assert target.read_bytes() == b"not the store's"


# Every call that changes the file system is counted, and the process kills itself before the call with number `step`.
KILLED = """
import json, os, shutil, signal, sys
from pathlib import Path
from archipel.lite_runtime.store.example_store import ExampleStore

template, work, action = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
NAMES = ("open", "replace", "rename", "pwrite", "fsync", "unlink", "fchmod", "mkdir")

def child(folder, step):
    calls = []
    def counted(name, real):
        def call(*args, **kwargs):
            if len(calls) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            calls.append(name)
            return real(*args, **kwargs)
        return call
    store = ExampleStore.open(folder, bytes(range(32)), max_age=None) if action == "erase" else None
    for name in NAMES:
        setattr(os, name, counted(name, getattr(os, name)))
    if action == "erase":
        store.erase()
    elif action == "destroy":
        ExampleStore.destroy(folder)
    else:
        ExampleStore.open(folder, bytes(range(32)), max_age=None).close()
    print(json.dumps(calls), flush=True)
    os._exit(0)

step = 0
while True:
    folder = work / f"{step:03}"
    if template.exists():
        shutil.copytree(template, folder)
    pid = os.fork()
    if not pid:
        child(folder, step)
    status = os.waitpid(pid, 0)[1]
    if not os.WIFSIGNALED(status):
        assert status == 0, status
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
    step += 1
"""


def kill_at_every_step(template: Path, work: Path, action: str) -> list[str]:
    """Folders work/000 ... as left by a process killed before its 1st, 2nd ... call, the last one by a whole run."""
    work.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(template), str(work), action],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    calls: list[str] = json.loads(done.stdout)
    assert len(list(work.iterdir())) >= len(calls)
    return calls


@pytest.mark.parametrize("action", ["erase", "destroy"])
@pytest.mark.sampled(every=4)
def test_killed_while_erasing_it_is_whole_or_erased(tmp_path: Path, action: str) -> None:
    template = tmp_path / "template"
    store = make(template)
    if action == "destroy":
        # As a process leaves it that was killed: log and shared memory are there.
        shutil.copytree(template, tmp_path / "in-use")
        template_used = tmp_path / "in-use"
    else:
        template_used = template
    store.close()
    record = (template / "store.key").read_bytes()
    calls = kill_at_every_step(template_used, tmp_path / "work", action)
    assert calls.count("replace") == 1
    assert calls.count("pwrite") == 1
    assert calls.count("unlink") >= 2
    assert calls.count("fsync") == 4
    whole = []
    for folder in sorted((tmp_path / "work").iterdir()):
        shutil.copytree(folder, tmp_path / "copy")
        ExampleStore.destroy(tmp_path / "copy")
        assert list((tmp_path / "copy").iterdir()) == []
        (tmp_path / "copy").rmdir()
        committed = not (folder / "store.key").exists()
        with ExampleStore.open(folder, KEY, max_age=None) as again:
            whole.append(len(again) == 5)
            assert whole[-1] != committed
            if whole[-1]:
                assert again.arrays()["y"].tolist() == [0, 1, 2, 3, 4]
                continue
            assert len(again) == 0
            assert not any(part in everything(folder) for part in key_parts(record))
            id = (folder / "store.key").read_bytes()[16:32].hex()
            names = {"store.key", *(f"examples-{id}.db{end}" for end in ("", "-wal", "-shm"))}
            assert {path.name for path in folder.iterdir()} == names
    # Whole up to the rename, erased from then on.
    assert whole == [index <= calls.index("replace") for index in range(len(calls) + 1)]


@pytest.mark.sampled(every=3)
def test_killed_while_it_is_made_it_opens(tmp_path: Path) -> None:
    calls = kill_at_every_step(tmp_path / "none", tmp_path / "work", "open")
    assert {"mkdir", "replace", "fsync"} <= set(calls)
    folders = sorted((tmp_path / "work").iterdir())
    assert len(folders) >= len(calls)
    for folder in folders:
        with ExampleStore.open(folder, KEY, max_age=None) as again:
            assert again.add({"y": np.int64(7)}) == 1
        assert sorted(path.suffix for path in folder.iterdir()) == [".db", ".key"]
