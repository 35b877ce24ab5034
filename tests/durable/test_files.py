"""Writing, creating, removing and sweeping where nothing is killed: modes, errors, and what stays as it was."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

import pytest

from archipel import durable
from tests.durable.runs import Tree, tree

T = TypeVar("T")


@pytest.fixture
def umask() -> Iterator[Callable[[int], None]]:
    before = os.umask(0o022)

    def change(mask: int) -> None:
        os.umask(mask)

    yield change
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def full(handle: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_modes(tmp_path: Path, umask: Callable[[int], None]) -> None:
    durable.write_durably(tmp_path / "secret", b"1")
    durable.write_durably(tmp_path / "page", b"1", 0o666)
    durable.create_durably(tmp_path / "key", b"1")
    durable.create_durably(tmp_path / "key.pub", b"1", 0o644)
    durable.make_folder(tmp_path / "a" / "b", 0o700)
    with durable.creating_folder(tmp_path / "made", 0o700):
        pass
    assert {path.name: mode(path) for path in tmp_path.rglob("*")} == {
        "secret": 0o600, "page": 0o644, "key": 0o600, "key.pub": 0o644, "a": 0o755, "b": 0o700, "made": 0o700,
    }  # fmt: skip
    umask(0o077)
    durable.write_durably(tmp_path / "page", b"1", 0o666)
    assert mode(tmp_path / "page") == 0o600


def test_a_new_mode_is_that_of_the_new_file(tmp_path: Path, umask: Callable[[int], None]) -> None:
    (tmp_path / "key").write_bytes(b"old")
    (tmp_path / "key").chmod(0o644)
    durable.write_durably(tmp_path / "key", b"new", 0o600)
    assert mode(tmp_path / "key") == 0o600


def interrupted(begun: AbstractContextManager[T], work: Callable[[T], object]) -> None:
    with begun as given:
        work(given)
        raise KeyboardInterrupt


def test_an_error_in_the_block_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    for begun, work in (
        (durable.replacing(tmp_path / "file"), lambda file: file.write(b"half")),
        (durable.creating(tmp_path / "new"), lambda file: file.write(b"half")),
        (durable.creating_folder(tmp_path / "made"), lambda folder: (folder / "one").write_bytes(b"1")),
    ):
        with pytest.raises(KeyboardInterrupt):
            interrupted(begun, work)
        assert tree(tmp_path) == {"file": "old"}


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", full)
    for write in (
        lambda: durable.write_durably(tmp_path / "file", b"new"),
        lambda: durable.create_durably(tmp_path / "new", b"new"),
    ):
        with pytest.raises(OSError, match="No space left"):
            write()
    with pytest.raises(OSError, match="No space left"), durable.creating_folder(tmp_path / "made") as folder:
        (folder / "one").write_bytes(b"1")
    assert tree(tmp_path) == {"file": "old"}


def test_a_folder_that_cannot_be_synced_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new file is there then, and whoever wrote it knows that it may not last."""
    real = os.fsync
    for write in (
        lambda: durable.write_durably(tmp_path / "file", b"new"),
        lambda: durable.create_durably(tmp_path / "made", b"new"),
        lambda: durable.publish(tmp_path / "file", tmp_path / "other"),
        lambda: durable.remove_durably(tmp_path / "other"),
        lambda: durable.make_folder(tmp_path / "folder"),
    ):
        monkeypatch.setattr(os, "fsync", lambda handle: full(handle) if is_folder(handle) else real(handle))
        with pytest.raises(OSError, match="No space left"):
            write()
    assert tree(tmp_path) == {"made": "new", "folder/": ""}


def is_folder(handle: int) -> bool:
    return os.path.isdir(f"/proc/self/fd/{handle}")


@pytest.mark.parametrize("write", [durable.write_durably, durable.create_durably])
def test_errors_name_the_file_that_was_asked_for(tmp_path: Path, write: Callable[[Path, bytes], None]) -> None:
    path = tmp_path / "nowhere" / "file"
    with pytest.raises(FileNotFoundError) as caught:
        write(path, b"new")
    assert caught.value.filename == str(path)
    with pytest.raises(FileNotFoundError) as caught, durable.creating_folder(path):
        pass
    assert caught.value.filename == str(path)


def test_a_full_disk_names_what_was_asked_for_and_the_remedy(tmp_path: Path) -> None:
    """Whichever call says so, with a name of its own, a temporary one, or none: as the system does."""
    path = tmp_path / "asked"

    def fail(name: str | None) -> None:
        (temporary,) = tmp_path.iterdir()
        raise OSError(errno.ENOSPC, "No space left on device", None if name is None else str(temporary) + name)

    def write(made: Callable[[Path], AbstractContextManager[object]], name: str | None) -> OSError:
        with pytest.raises(OSError, match="left") as caught, made(path):
            fail(name)
        assert tree(tmp_path) == {}
        return caught.value

    for made in (durable.replacing, durable.creating, durable.temporary_folder, durable.creating_folder):
        for name in (None, ""):
            assert write(made, name).filename == str(path)
    assert write(durable.creating_folder, "/one").filename == str(path / "one")
    assert durable.reason_of(write(durable.replacing, None)) == "No space left on device; free some space and run again"
    assert durable.reason_of(OSError(errno.EACCES, "Permission denied")) == "Permission denied"
    with pytest.raises(OSError, match="elsewhere"), durable.creating_folder(path):
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "elsewhere"))


def test_what_is_there_is_never_replaced_by_a_new_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "link"):
        with pytest.raises(FileExistsError):
            durable.create_durably(tmp_path / name, b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert (tmp_path / "link").is_symlink()
    assert not (tmp_path / "nowhere").exists()


def test_a_new_file_has_its_name_while_it_is_written(tmp_path: Path) -> None:
    with durable.creating(tmp_path / "token") as file:
        with pytest.raises(FileExistsError):
            durable.create_durably(tmp_path / "token", b"another")
        file.write(b"mine")
    assert (tmp_path / "token").read_bytes() == b"mine"


def test_a_folder_with_something_in_it_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "one").write_bytes(b"old")
    with pytest.raises(OSError, match="not empty"), durable.creating_folder(tmp_path / "made") as folder:
        (folder / "one").write_bytes(b"new")
    assert tree(tmp_path) == {"made/": "", "made/one": "old"}


def test_folders_one_after_the_other(tmp_path: Path) -> None:
    for text in ("first", "second"):
        with durable.temporary_folder(tmp_path / "slot") as new:
            (new / "one").write_text(text)
            durable.sync_tree(new)
            durable.replace_folder(new, tmp_path / "slot")
        assert tree(tmp_path) == {"slot/": "", "slot/one": text}


def test_removing_what_is_not_there(tmp_path: Path) -> None:
    assert not durable.remove_durably(tmp_path / "file")
    assert not durable.remove_durably(tmp_path / "nowhere" / "file")
    assert not durable.overwrite(tmp_path / "file")


def test_overwriting_covers_all_of_a_file_and_follows_no_link(tmp_path: Path) -> None:
    path, size = tmp_path / "file", (2 << 20) + 5
    path.write_bytes(bytes(size))
    os.link(path, tmp_path / "same")
    assert durable.overwrite(path)
    after = (tmp_path / "same").read_bytes()
    assert len(after) == size
    # Of random bytes every 256th is zero; not a run of them anywhere.
    assert bytes(16) not in after
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="symbolic link"):
        durable.overwrite(tmp_path / "link")
    assert path.read_bytes() == after


LEFT: Tree = {
    ".key.0f.tmp": "1", ".key.pub.0f.tmp": "2", ".other.0f.tmp": "3", ".made.0f.tmp/": "", ".made.0f.tmp/one": "4",
    "key": "5", ".key": "6", "key.0f.tmp": "7", ".notes.tmp": "8",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("", {".key.0f.tmp", ".key.pub.0f.tmp", ".other.0f.tmp", ".made.0f.tmp/", ".made.0f.tmp/one"}),
        ("key", {".key.0f.tmp", ".key.pub.0f.tmp"}),  # "key.pub" might be a token of "key"
        ("key.pub", {".key.pub.0f.tmp"}),
        ("made", {".made.0f.tmp/", ".made.0f.tmp/one"}),
        ("k[e]y", set()),
    ],
)
def test_sweeping(tmp_path: Path, name: str, gone: set[str]) -> None:
    for path, text in LEFT.items():
        if path.endswith("/"):
            (tmp_path / path).mkdir()
        else:
            (tmp_path / path).write_text(text)
    durable.sweep(tmp_path, name)
    assert tree(tmp_path) == {path: text for path, text in LEFT.items() if path not in gone}


def test_sweeping_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "one").write_bytes(b"1")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".x.0f.tmp").symlink_to(tmp_path / "mine")
    durable.sweep(tmp_path / "folder")
    assert tree(tmp_path) == {"folder/": "", "mine/": "", "mine/one": "1"}
    durable.sweep(tmp_path / "nowhere")
