"""The local copies of an object store's files: bounded, shared by threads and processes, never half, never wrong."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from archipel.errors import ServerError
from archipel.server.storage.cache import BlobCache

SIZE = 10_000


class Source:
    """Objects to fetch, and how often each was."""

    def __init__(self, count: int = 8, size: int = SIZE) -> None:
        found = [random.Random(number).randbytes(size) for number in range(count)]
        self.data = {hashlib.sha256(each).hexdigest(): each for each in found}
        self.digests = list(self.data)
        self.fetched: list[str] = []

    def fetch(self, digest: str) -> Iterator[bytes]:
        self.fetched.append(digest)
        data = self.data[digest]
        for at in range(0, len(data), 3000):
            yield data[at : at + 3000]

    def read(self, cache: BlobCache, digest: str) -> bytes:
        with cache.hold(digest, lambda: self.fetch(digest)) as path:
            return path.read_bytes()


def new_cache(folder: Path, max_bytes: int = 10 * SIZE) -> BlobCache:
    made = BlobCache(folder, max_bytes)
    made.prepare()
    return made


def kept(folder: Path) -> set[str]:
    return {path.name for path in (folder / "sha256").iterdir()}


def half_written(folder: Path) -> list[str]:
    return [path.name for path in (folder / "incoming").iterdir()]


def test_what_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    source, cache = Source(), new_cache(tmp_path)
    first = source.digests[0]
    for there in (cache, cache, new_cache(tmp_path)):
        assert source.read(there, first) == source.data[first]
    assert source.fetched == [first]
    assert kept(tmp_path) == {first}


def test_the_least_recently_used_go(tmp_path: Path) -> None:
    source, cache = Source(), new_cache(tmp_path, 3 * SIZE)
    a, b, c, d, e = source.digests[:5]
    for digest in (a, b, c):
        source.read(cache, digest)
        time.sleep(0.01)
    source.read(cache, a)
    time.sleep(0.01)
    # Another process's reading counts too.
    source.read(new_cache(tmp_path, 3 * SIZE), b)
    time.sleep(0.01)
    source.read(cache, d)
    assert kept(tmp_path) == {a, b, d}
    source.read(cache, e)
    assert kept(tmp_path) == {b, d, e}
    assert source.fetched == [a, b, c, d, e]


def test_what_is_held_stays_whoever_holds_it(tmp_path: Path) -> None:
    source, cache = Source(), new_cache(tmp_path, 2 * SIZE)
    other = new_cache(tmp_path, 2 * SIZE)
    first, second = source.digests[:2]
    with cache.hold(first, lambda: source.fetch(first)) as one, other.hold(second, lambda: source.fetch(second)) as two:
        for digest in source.digests[2:]:
            assert source.read(other, digest) == source.data[digest]
            assert kept(tmp_path) == {first, second}
        assert (one.read_bytes(), two.read_bytes()) == (source.data[first], source.data[second])
    # Let go of, they are like any other.
    for digest in source.digests[2:4]:
        source.read(cache, digest)
    assert kept(tmp_path) == set(source.digests[2:4])


def test_one_that_is_larger_than_the_whole_cache_passes_through(tmp_path: Path) -> None:
    source, cache = Source(3), new_cache(tmp_path, SIZE - 1)
    for digest in source.digests:
        assert source.read(cache, digest) == source.data[digest]
    assert (kept(tmp_path), half_written(tmp_path)) == (set(), [])


@pytest.mark.parametrize("harm", ["other", "shorter", "longer", "empty"])
@pytest.mark.parametrize("process", ["the same process", "another process"])
def test_a_damaged_file_is_fetched_again(tmp_path: Path, harm: str, process: str) -> None:
    source, cache = Source(), new_cache(tmp_path)
    digest = source.digests[0]
    data = source.read(cache, digest)
    path = tmp_path / "sha256" / digest
    before = path.stat()
    other = data[:-1] + bytes([data[-1] ^ 1])
    path.write_bytes({"other": other, "shorter": data[:-1], "longer": data + b"\0", "empty": b""}[harm])
    if process == "another process":
        # As after a power cut: nothing but the bytes says that they are wrong.
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        cache = new_cache(tmp_path)
    assert source.read(cache, digest) == data
    assert path.read_bytes() == data
    assert source.fetched == [digest, digest]


def test_bytes_that_arrive_damaged(tmp_path: Path) -> None:
    source, cache = Source(), new_cache(tmp_path)
    digest = source.digests[0]
    answers: list[list[bytes]] = [[b"wrong"], [source.data[digest]]]
    with cache.hold(digest, lambda: answers.pop(0)) as path:
        assert path.read_bytes() == source.data[digest]
    answers = [[b"wrong"], [b"wrong again"]]
    with pytest.raises(ServerError, match=f"{'1' * 64}.*11 other bytes"), cache.hold("1" * 64, lambda: answers.pop(0)):
        pass
    assert (kept(tmp_path), half_written(tmp_path)) == ({digest}, [])


def test_a_fetch_that_breaks_off_leaves_nothing_and_is_tried_again_next_time(tmp_path: Path) -> None:
    source, cache = Source(), new_cache(tmp_path)
    digest = source.digests[0]

    def broken() -> Iterable[bytes]:
        yield source.data[digest][:5000]
        assert len(half_written(tmp_path)) == 1
        assert kept(tmp_path) == set()
        raise TimeoutError

    with pytest.raises(TimeoutError), cache.hold(digest, broken):
        pass
    assert (kept(tmp_path), half_written(tmp_path)) == (set(), [])
    assert source.read(cache, digest) == source.data[digest]


def test_many_that_ask_for_the_same_fetch_it_once(tmp_path: Path) -> None:
    source = Source()
    digest = source.digests[0]
    caches = [new_cache(tmp_path) for _ in range(4)]
    ready = threading.Barrier(12)
    found: list[bytes] = []

    def slowly() -> Iterator[bytes]:
        for piece in source.fetch(digest):
            time.sleep(0.02)
            yield piece

    def ask(number: int) -> None:
        ready.wait()
        with caches[number % 4].hold(digest, slowly) as path:
            found.append(path.read_bytes())

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [source.data[digest]] * 12
    assert source.fetched == [digest]


READERS = """
import hashlib, random, sys, threading
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from tests.server.storage.test_cache import SIZE, Source
from archipel.server.storage.cache import BlobCache
folder, seed = Path(sys.argv[1]), int(sys.argv[2])
source, cache = Source(), BlobCache(folder, 3 * SIZE)
failed = []

def work(number):
    try:
        chosen = random.Random(seed * 100 + number)
        for _ in range(150):
            digest = chosen.choice(source.digests)
            with cache.hold(digest, lambda: source.fetch(digest)) as path:
                # Opened late, as somebody does who was interrupted.
                if chosen.random() < 0.3:
                    threading.Event().wait(0.001)
                assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
    except BaseException as error:
        failed.append(repr(error))
        raise

threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not failed, failed
print(len(source.fetched))
"""


@pytest.mark.sampled(every=4)
def test_threads_of_several_processes_in_a_cache_that_is_too_small(tmp_path: Path) -> None:
    """Everything is thrown out and fetched again all the time, and nobody ever sees anything but the right bytes."""
    new_cache(tmp_path, 3 * SIZE)
    root = str(Path(__file__).parents[3])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", READERS, str(tmp_path), str(seed), root],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for seed in range(3)
    ]  # fmt: skip
    # One more that is killed again and again leaves nobody waiting for its locks.
    for _ in range(3):
        victim = subprocess.Popen([sys.executable, "-c", READERS, str(tmp_path), "9", root], stderr=subprocess.PIPE)
        time.sleep(0.7)
        victim.kill()
        victim.communicate()
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert sum(int(out) for out, _ in outputs) > 100  # it was too small indeed
    # While all eight were in use at once it was more than three. With nobody left, the next one makes room.
    source, cache = Source(9), new_cache(tmp_path, 3 * SIZE)
    source.read(cache, source.digests[8])
    assert len(kept(tmp_path)) == 3


def test_kill_minus_9_while_fetching(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from archipel.server.storage.cache import BlobCache
cache = BlobCache(Path(sys.argv[1]), 1 << 20)
cache.prepare()

def fetch():
    yield b"half"
    os.kill(os.getpid(), signal.SIGKILL)

with cache.hold("0" * 64, fetch):
    pass
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert kept(tmp_path) == set()
    assert len(half_written(tmp_path)) == 1
    # A day later the next start removes it; until then it may be somebody's who is still at it.
    cache = new_cache(tmp_path)
    assert len(half_written(tmp_path)) == 1
    (left,) = (tmp_path / "incoming").iterdir()
    os.utime(left, (time.time() - 90_000,) * 2)
    cache.prepare()
    assert half_written(tmp_path) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ServerError, match="cannot be written"):
        BlobCache(tmp_path / "file", 1000).prepare()
    with pytest.raises(ServerError, match="missing or not writable"):
        BlobCache(tmp_path / "nothing", 1000).check()
