"""What every kind of storage must do: the same tests over a folder and over an object store."""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from archipel.bundle import write_weights
from archipel.errors import ServerError
from archipel.server.storage.spool import sum_name, update_name
from tests.support.places import Place

HELLO = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.sampled(every=3)
def test_a_blob_is_named_by_its_digest(place: Place) -> None:
    place.blobs.check()
    assert place.blobs.put(b"hello") == HELLO
    assert place.blobs.put(b"hello") == HELLO
    assert place.files() == {f"sha256/2c/{HELLO}": b"hello"}
    assert place.leftovers() == []
    for there in (place, place.other_process(), place.other_machine()):
        assert there.blobs.read(HELLO) == b"hello"
        with there.blobs.open(HELLO) as path:
            assert path.read_bytes() == b"hello"
    with pytest.raises(ServerError, match="0" * 64):
        place.blobs.read("0" * 64)


def test_weights_are_mapped_and_outlive_their_file(place: Place) -> None:
    tensors = {"w": np.arange(6, dtype=np.float32).reshape(3, 2)}
    digest = place.blobs.put(write_weights(tensors))
    other = place.other_machine()
    found = other.blobs.read_weights(digest)
    place.delete(f"sha256/{digest[:2]}/{digest}")
    np.testing.assert_array_equal(found["w"], tensors["w"])


@pytest.mark.sampled(every=3)
def test_nothing_is_there_before_it_is_kept(place: Place) -> None:
    written = place.blobs.receive([b"he", b"llo"])
    assert (written.digest, written.size) == (HELLO, 5)
    assert place.files() == {}
    with pytest.raises(ServerError):
        place.blobs.read(HELLO)
    written.discard()
    written.discard()
    assert (place.files(), place.leftovers()) == ({}, [])


def test_an_interrupted_upload_leaves_nothing(place: Place) -> None:
    def broken() -> Iterator[bytes]:
        yield b"some"
        raise ConnectionError

    place.spool.open_round("r")
    with pytest.raises(ConnectionError):
        place.blobs.receive(broken())
    with pytest.raises(ConnectionError):
        place.spool.receive("r", broken())
    with pytest.raises(ConnectionError):
        place.spool.keep_sum("r", broken())
    assert (place.files(), place.leftovers()) == ({}, [])


@pytest.mark.parametrize(
    "size",
    [
        0,
        1,
        (16 << 20) + 1,
        *(pytest.param(size, marks=pytest.mark.slow) for size in (16 << 20, 24 << 20, (24 << 20) + 5)),
    ],
)
@pytest.mark.sampled(every=6)
def test_sizes(place: Place, size: int) -> None:
    data = random.Random(size).randbytes(size)
    digest = place.blobs.keep(place.blobs.receive(data[at : at + 700_001] for at in range(0, size, 700_001)))
    assert digest == sha256(data)
    assert place.other_machine().blobs.read(digest) == data
    place.spool.open_round("r")
    place.spool.keep("r", "d", place.spool.receive("r", [data]))
    assert place.other_machine().spool.read("r", "d", digest) == data
    assert place.leftovers() == []


@pytest.mark.parametrize("harm", ["shorter", "longer", "other", "empty", "gone"])
@pytest.mark.sampled(every=6)
def test_what_is_damaged_is_found(place: Place, harm: str) -> None:
    data = random.Random(harm).randbytes(100_000)
    place.spool.open_round("r")
    digest = place.blobs.put(data)
    place.spool.keep("r", "d", place.spool.receive("r", [data]))
    assert place.spool.keep_sum("r", [data]).digest == digest
    keys = (f"sha256/{digest[:2]}/{digest}", f"updates/r/d.{digest}", f"updates/r/sum.{digest}")
    assert set(place.files()) == set(keys)
    for key in keys:
        if harm == "gone":
            place.delete(key)
        else:
            other = data[:-1] + bytes([data[-1] ^ 1])
            place.write(key, {"shorter": data[:-1], "longer": data + b"\0", "other": other, "empty": b""}[harm])
    there = place.other_machine()
    with pytest.raises(ServerError, match=digest):
        there.blobs.read(digest)
    said = "cannot be read" if harm == "gone" else "differ from the acknowledged"
    with pytest.raises(ServerError, match=f"update of device d: .*{said}"):
        there.spool.read("r", "d", digest)
    with pytest.raises(ServerError, match=f"sum of round r: .*{said}"):
        there.spool.read_sum("r", digest)


def test_the_files_of_a_round(place: Place) -> None:
    spool = place.spool
    spool.open_round("r1")
    spool.open_round("r2")
    written = spool.receive("r1", [b"up", b"date"])
    digest = sha256(b"update")
    assert (written.size, written.digest) == (6, digest)
    assert spool.keep("r1", "d1", written) == f"d1.{digest}" == update_name("d1", digest)
    assert place.files() == {f"updates/r1/d1.{digest}": b"update"}
    assert spool.read("r1", "d1", digest) == b"update"
    # The same bytes again are the same file.
    spool.keep("r1", "d1", spool.receive("r1", [b"update"]))
    assert len(place.files()) == 1


@pytest.mark.sampled(every=3)
def test_checkpoints_of_the_sum_and_dropping_what_is_folded(place: Place) -> None:
    spool = place.spool
    spool.open_round("r")
    spool.open_round("other")
    digests = [spool.receive("r", [b"update", bytes([n])]) for n in range(3)]
    names = [spool.keep("r", f"d{n}", written) for n, written in enumerate(digests)]
    spool.keep("other", "d0", spool.receive("other", [b"x"]))
    first = spool.keep_sum("r", (bytes([n]) * 1000 for n in range(3)))
    whole = b"".join(bytes([n]) * 1000 for n in range(3))
    assert (first.digest, first.size) == (sha256(whole), 3000)
    assert place.other_process().spool.read_sum("r", first.digest) == whole
    assert spool.keep_sum("r", [whole]).digest == first.digest
    second = spool.keep_sum("r", [b"more"])
    spool.drop("r", [*names[:2], sum_name(first.digest)])
    left = {f"updates/r/{names[2]}", f"updates/r/sum.{second.digest}", f"updates/other/d0.{sha256(b'x')}"}
    assert set(place.files()) == left
    # Dropped already, never there, none at all.
    spool.drop("r", [*names[:2], "d9.0", sum_name(first.digest)])
    spool.drop("r", [])
    spool.drop("gone", names)
    assert set(place.files()) == left
    with pytest.raises(ServerError, match="cannot be read"):
        spool.read_sum("r", first.digest)
    spool.discard("r")
    assert set(place.files()) == {f"updates/other/d0.{sha256(b'x')}"}


@pytest.mark.sampled(every=3)
def test_rounds_that_are_over(place: Place) -> None:
    spool = place.spool
    for name in ("r1", "r2", "r3", "r22"):
        spool.open_round(name)
        spool.keep(name, "d", spool.receive(name, [name.encode()]))
    written = spool.receive("r2", [b"under way"])
    spool.discard("r2")
    spool.discard("r2")
    # Refused, or left for the sweep: the database acknowledges nothing of a round that is over.
    try:
        spool.keep("r2", "late", written)
        spool.keep("r2", "late", spool.receive("r2", [b"late"]))
    except FileNotFoundError:
        written.discard()
    with pytest.raises(ServerError, match="cannot be read"):
        spool.read("r2", "d", sha256(b"r2"))
    spool.sweep(lambda: ["r1", "r22"])
    assert place.files() == {f"updates/{name}/d.{sha256(name.encode())}": name.encode() for name in ("r1", "r22")}
    assert sorted(place.storage.folders("updates")) == ["r1", "r22"]
    assert place.leftovers() == []
    spool.sweep(list)
    spool.sweep(list)
    assert (place.files(), place.storage.folders("updates")) == ({}, [])


@pytest.mark.slow
def test_a_round_of_more_files_than_one_request_lists_or_deletes(place: Place) -> None:
    """1000 of S3's."""
    place.spool.open_round("r")
    with ThreadPoolExecutor(4) as pool:  # from outside, which is quicker
        list(pool.map(lambda number: place.write(f"updates/r/d{number}.x", b""), range(1003)))
    assert sorted(place.storage.keys("updates")) == sorted(f"updates/r/d{number}.x" for number in range(1003))
    place.spool.drop("r", [f"d{number}.x" for number in range(1001)])
    assert sorted(place.files()) == ["updates/r/d1001.x", "updates/r/d1002.x"]


@pytest.mark.sampled(every=3)
def test_leftovers_are_swept_when_they_are_old(place: Place) -> None:
    old, new = place.blobs.receive([b"old"]), place.blobs.receive([b"new"])
    os.utime(old.temporary, (1000.0, 1000.0))
    place.blobs.sweep(before=2000.0)
    assert not old.temporary.exists()
    assert new.temporary.exists()
    assert place.blobs.keep(new) == sha256(b"new")


@pytest.mark.sampled(every=4)
def test_many_at_once(place: Place) -> None:
    """Uploads, reads and deletions of many threads, as in a web process."""
    place.spool.open_round("r")
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(6):
                data = random.Random(f"{number % 4} {step}").randbytes(50_000)  # four of them write the same
                digest = place.blobs.put(data)
                assert place.blobs.read(digest) == data
                name = place.spool.keep("r", f"d{number}", place.spool.receive("r", [data]))
                assert place.spool.read("r", f"d{number}", digest) == data
                place.spool.drop("r", [name])
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(place.files()) == 24
    assert place.leftovers() == []


def test_keys_are_those_of_what_is_kept(place: Place) -> None:
    place.spool.open_round("r")
    place.blobs.receive([b"not kept"])
    digest = place.blobs.put(b"hello")
    place.spool.keep("r", "d", place.spool.receive("r", [b"hello"]))
    assert sorted(place.storage.keys("")) == [f"sha256/2c/{digest}", f"updates/r/d.{digest}"]
    assert list(place.storage.keys("sha256")) == [f"sha256/2c/{digest}"]
    assert list(place.storage.keys("nothing")) == []


def test_it_says_whether_it_works(place: Place) -> None:
    started = time.monotonic()
    for _ in range(200):
        place.blobs.check()
    assert time.monotonic() - started < 2
