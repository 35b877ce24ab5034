"""The example store as an app sees it: adding, sampling, quotas, several processes."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipel.errors import (
    RuntimeInputError,
    RuntimeLimitError,
    StoreBusyError,
    StoreError,
    StoreQuotaError,
    StoreRecordError,
)
from archipel.lite_runtime.store.example_store import ExampleStore
from archipel.lite_runtime.store.layout import Field, Layout

KEY = bytes(range(32))
DAY = 86400.0

Open = Callable[..., ExampleStore]


class Clock:
    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def open_store(tmp_path: Path, clock: Clock) -> Iterator[Open]:
    stores = []

    def open_one(**options: Any) -> ExampleStore:
        stores.append(ExampleStore.open(tmp_path / "store", KEY, **{"clock": clock, **options}))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


def examples(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(count, 2, 3)).astype(np.float32),
        "y": np.arange(count, dtype=np.int64) + 1000 * seed,
        "ok": rng.integers(0, 2, count).astype(bool),
        "half": rng.normal(size=(count, 1)).astype(np.float16),
    }


def assert_same(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert set(got) == set(expected)
    for name, array in expected.items():
        assert got[name].dtype == array.dtype
        np.testing.assert_array_equal(got[name], array)


def test_what_is_added_comes_back_in_another_process_too(open_store: Open) -> None:
    store, data = open_store(), examples(5)
    assert len(store) == store.nbytes == 0
    assert store.fields == {}
    first = store.add({name: array[0] for name, array in data.items()})
    rest = store.add_many({name: array[1:] for name, array in data.items()})
    assert [first, *rest] == store.select().tolist() == [1, 2, 3, 4, 5]
    assert store.fields == {
        "x": Field("float32", (2, 3)), "y": Field("int64", ()), "ok": Field("bool", ()), "half": Field("float16", (1,)),
    }  # fmt: skip
    # 24 + 8 + 1 + 2 bytes of fields, 24 of nonce and 16 of tag.
    assert store.nbytes == 5 * (35 + 40)
    store.close()
    with open_store() as again:
        assert len(again) == 5
        assert_same(again.arrays(), data)
        assert_same(again.read([4, 2, 2]), {name: array[[3, 1, 1]] for name, array in data.items()})
        assert again.add_many({name: array[:0] for name, array in data.items()}) == range(6, 6)


def test_arrays_in_any_memory_order(open_store: Open) -> None:
    array = np.arange(24, dtype=np.float64).reshape(2, 3, 4).transpose(2, 0, 1)
    store = open_store()
    store.add_many({"x": array[::-1]})
    store.add({"x": np.asfortranarray(array[0])})
    np.testing.assert_array_equal(store.arrays()["x"], np.concatenate([array[::-1], array[:1]]))


def test_a_bool_is_0_or_1_whatever_was_stored() -> None:
    layout = Layout({"ok": Field("bool", (3,))})
    arrays = layout.empty(2)
    layout.unpack(np.array([[0, 1, 2], [255, 0, 1]], np.uint8), arrays, np.array([1, 0]))
    assert arrays["ok"].view(np.uint8).tolist() == [[1, 0, 1], [0, 1, 1]]


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"x": np.zeros(3, np.float32)}, "has the fields x, y; got x"),
        (
            {"x": np.zeros(3, np.float64), "y": np.int64(1)},
            r"'x' must be float32\[3\] per example, got float64\[3\]; conv",
        ),
        ({"x": np.zeros(4, np.float32), "y": np.int64(1)}, r"'x' must be float32\[3\] per example, got float32\[4\]$"),
        (
            {"x": np.zeros(3, np.float32), "y": np.zeros(1, np.int64)},
            r"'y' must be int64\[\] per example, got int64\[1\]",
        ),
        ({"x": np.zeros(3, np.float32), "y": 1}, "'y' must be a numpy array, got int"),
        ({"x": np.array([{}]), "y": np.int64(1)}, "dtype object"),
        ({}, "without fields"),
        ([1], "a mapping"),
    ],
)
def test_an_example_unlike_the_first_is_refused(open_store: Open, example: Any, message: str) -> None:
    store = open_store()
    store.add({"x": np.zeros(3, np.float32), "y": np.int64(0)})
    with pytest.raises(RuntimeInputError, match=message):
        store.add(example)
    assert len(store) == 1


def test_batches_that_are_none_are_refused(open_store: Open) -> None:
    store = open_store()
    with pytest.raises(RuntimeInputError, match="no batch axis"):
        store.add_many({"x": np.float32(1)})
    with pytest.raises(RuntimeInputError, match="different numbers"):
        store.add_many({"x": np.zeros((2, 1)), "y": np.zeros(3)})
    for example in ({"x": np.zeros((1, 0))}, {"x\n": np.zeros(1)}, {str(i): np.zeros(1) for i in range(65)}):
        with pytest.raises(StoreError, match="example store"):
            store.add(example)
    assert store.fields == {}
    with pytest.raises(StoreError, match="no examples yet"):
        store.sample(1, 0)


def test_oldest_go_first_and_the_quota_holds(open_store: Open) -> None:
    store = open_store(max_bytes=10 * (8 + 40) + 47)
    store.add_many({"y": np.arange(7)})
    for value in range(7, 30):
        store.add({"y": np.int64(value)})
        assert store.nbytes <= 10 * 48
    np.testing.assert_array_equal(store.arrays()["y"], np.arange(20, 30))
    # Ids are never used again, not even after the newest was removed.
    store.remove([30])
    assert store.add({"y": np.int64(30)}) == 31
    with pytest.raises(StoreQuotaError, match="11 examples of 48 sealed bytes"):
        store.add_many({"y": np.arange(11)})
    assert store.arrays()["y"].tolist() == [*range(20, 29), 30]
    store.add_many({"y": np.arange(10)})
    np.testing.assert_array_equal(store.arrays()["y"], np.arange(10))
    store.close()
    with open_store(max_bytes=3 * 48) as smaller:
        assert smaller.arrays()["y"].tolist() == [7, 8, 9]
    with open_store(max_bytes=47) as none, pytest.raises(StoreQuotaError):
        none.add({"y": np.int64(1)})


def test_a_clock_that_was_set_back_does_not_make_the_newest_go(open_store: Open, clock: Clock) -> None:
    store = open_store(max_bytes=2 * 48)
    store.add_many({"y": np.arange(2)})
    clock.now -= 3600
    store.add({"y": np.int64(2)})
    assert store.arrays()["y"].tolist() == [1, 2]
    store.add({"y": np.int64(3)})
    assert store.arrays()["y"].tolist() == [2, 3]


def test_examples_expire_without_being_asked_to(open_store: Open, clock: Clock) -> None:
    store = open_store(max_age=timedelta(days=2))
    for value in range(4):
        store.add({"y": np.int64(value)})
        clock.now += DAY / 2
    assert store.arrays()["y"].tolist() == [0, 1, 2, 3]
    clock.now += 1
    assert len(store) == 3
    clock.now += DAY / 2
    assert store.sample(10, 0)["y"].tolist() != []
    assert store.select().tolist() == [3, 4]
    with pytest.raises(StoreRecordError, match="example 1 is not there") as error:
        store.read([3, 1])
    assert error.value.id == 1
    clock.now += DAY / 2
    assert store.expire() == 1
    clock.now += DAY / 2
    store.add({"y": np.int64(9)})
    assert store.arrays()["y"].tolist() == [9]
    store.close()
    clock.now += 10 * DAY
    with open_store(max_age=None) as kept:
        assert len(kept) == 1
    with open_store(max_age=DAY) as reopened:
        assert len(reopened) == 0


def test_an_example_of_exactly_the_allowed_age_stays(open_store: Open, clock: Clock) -> None:
    store = open_store(max_age=DAY)
    store.add({"y": np.int64(1)})
    clock.now += DAY
    assert store.expire() == 0
    assert store.arrays()["y"].tolist() == [1]
    clock.now += 1
    assert store.expire() == 1


def test_select_by_time(open_store: Open, clock: Clock) -> None:
    store, start = open_store(), clock.now
    for value in range(6):
        clock.now = start + 10 * value
        store.add({"y": np.int64(value)})
    assert store.select(since=start + 10, until=start + 40).tolist() == [2, 3, 4]
    assert store.select(since=start + 10, until=start + 40, limit=2).tolist() == [3, 4]
    assert store.select(limit=0).tolist() == []
    assert store.remove([3, 3, 99]) == 1
    assert store.remove(store.select(until=start + 20)) == 2
    assert store.arrays()["y"].tolist() == [3, 4, 5]
    assert store.nbytes == 3 * 48


def mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def order(count: int, seed: int) -> list[int]:
    """The runtimes' data order for phase 0 and epoch 0, written anew."""

    def fold(last: int) -> int:
        value = 0
        for word in (seed, 0, 0, last):
            value = mix(((value ^ word) + 0x9E3779B9) % 2**32)
        return value

    a, b = fold(0), fold(1)
    return sorted(range(count), key=lambda i: mix(mix((i + a) % 2**32) ^ b))


def test_samples_are_those_of_the_hash(open_store: Open) -> None:
    store = open_store()
    store.add_many({"y": np.arange(40)})
    store.remove([1, 5, 17])
    there = store.arrays()["y"]
    for seed in (0, 1, 2**32 - 1):
        expected = there[order(37, seed)]
        assert store.sample(9, seed)["y"].tolist() == expected[:9].tolist()
        assert store.sample(1000, seed)["y"].tolist() == expected.tolist()
    assert store.sample(3, 5, ids=[2, 3, 4, 6])["y"].tolist() == np.array([1, 2, 3, 5])[order(4, 5)[:3]].tolist()
    for count, seed in ((0, 0), (1, -1), (1, 2**32)):
        with pytest.raises(RuntimeInputError, match=r"sample at least|seed"):
            store.sample(count, seed)


def test_samples_are_uniform(open_store: Open) -> None:
    rows, drawn, seeds = 50, 5, 1000
    store = open_store()
    store.add_many({"y": np.arange(rows)})
    counts = np.zeros(rows)
    firsts = np.zeros(rows)
    for seed in range(seeds):
        values = store.sample(drawn, seed)["y"]
        assert len(set(values.tolist())) == drawn
        counts[values] += 1
        firsts[values[0]] += 1
    # Chi-square with 49 degrees of freedom: 85.4 is exceeded with probability 0.001. Drawing without replacement makes
    # the counts of a seed a little less varied, hence the factor.
    expected = seeds * drawn / rows
    assert ((counts - expected) ** 2 / expected).sum() * (rows - 1) / (rows - drawn) < 85.4
    assert ((firsts - seeds / rows) ** 2 / (seeds / rows)).sum() < 85.4


def test_batches_go_in_the_order_of_fit(open_store: Open) -> None:
    store = open_store()
    store.add_many({"y": np.arange(10)})
    one_epoch = [batch["y"].tolist() for batch in store.batches(4, seed=3)]
    expected = order(10, 3)
    assert one_epoch == [expected[:4], expected[4:8], expected[8:]]
    two = np.concatenate([batch["y"] for batch in store.batches(4, epochs=2, seed=3)])
    assert two[:10].tolist() == expected
    assert sorted(two[10:].tolist()) == list(range(10))
    plain = store.batches(5, shuffled=False, ids=store.select(limit=8))
    assert next(plain)["y"].tolist() == [2, 3, 4, 5, 6]
    store.remove([8, 9])
    assert next(plain)["y"].tolist() == [9]
    store.add({"y": np.int64(10)})
    assert next(plain, None) is None
    assert list(store.batches(4, ids=[])) == []
    with pytest.raises(RuntimeInputError, match="batch_size from 1"):
        store.batches(0)


def test_all_at_once_only_within_a_limit(open_store: Open) -> None:
    store = open_store()
    store.add_many({"x": np.zeros((10, 25), np.float32)})
    assert store.arrays(limit_bytes=1000)["x"].shape == (10, 25)
    with pytest.raises(RuntimeLimitError, match="10 examples are 1000 bytes in memory, the limit is 999"):
        store.arrays(limit_bytes=999)


@pytest.mark.sampled(every=3)
def test_sampling_needs_the_memory_of_the_sample(open_store: Open) -> None:
    store = open_store()
    data = np.zeros((5000, 1024), np.float32)
    data[:, 0] = np.arange(5000)
    for start in range(0, 5000, 1000):
        store.add_many({"x": data[start : start + 1000]})
    assert store.nbytes > 20_000_000
    tracemalloc.start()
    try:
        taken = store.sample(64, 1)["x"]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        total = sum(len(batch["x"]) for batch in store.batches(64, seed=1))
        peak_of_batches = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(taken[:, 0], order(5000, 1)[:64])
    assert total == 5000
    # The sample is 256 KiB; rows on their way are held three times, ids and their order are 100 bytes a row at most.
    assert peak < (4 * 64 * 4096) + 100 * 5000
    assert peak_of_batches < (5 * 64 * 4096) + 100 * 5000


def test_a_closed_store_and_a_forked_one(open_store: Open) -> None:
    store = open_store()
    assert repr(store).endswith("store')")
    store.close()
    store.close()
    with pytest.raises(StoreError, match="is closed"):
        len(store)
    with pytest.raises(StoreError, match="is closed"):
        store.add({"y": np.int64(1)})
    assert "closed" in repr(store)
    assert KEY.hex() not in repr(vars(store))
    store = open_store()
    store._process += 1
    with pytest.raises(StoreError, match="before a fork"):
        len(store)
    store._process -= 1


@pytest.mark.parametrize("options", [{"max_bytes": 0}, {"max_age": 0}, {"max_age": float("nan")}])
def test_quotas_must_be_positive(open_store: Open, options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="quotas must be above 0"):
        open_store(**options)
    assert not (tmp_path / "store").exists()


def test_a_clock_that_gives_no_time(open_store: Open, clock: Clock) -> None:
    store = open_store()
    clock.now = float("nan")
    with pytest.raises(StoreError, match="the clock gave nan"):
        store.add({"y": np.int64(1)})


def test_files_are_the_owners_alone(open_store: Open, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = open_store()
        store.add({"y": np.int64(1)})
    finally:
        os.umask(before)
    paths = [tmp_path / "store", *(tmp_path / "store").iterdir()]
    assert len(paths) == 5
    assert all(path.stat().st_mode & 0o077 == 0 for path in paths)


def test_space_is_given_back(open_store: Open, tmp_path: Path) -> None:
    store = open_store()
    store.add_many({"x": np.zeros((3000, 256), np.float32)})
    store.remove(store.select(limit=2900))
    # An empty log, and about a thirtieth of the 3.1 MB.
    assert sum(path.stat().st_size for path in (tmp_path / "store").iterdir()) < 500_000


def test_commits_are_durable(open_store: Open) -> None:
    database = open_store()._database()
    assert database.execute("PRAGMA synchronous").fetchone() == (2,)
    assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert database.execute("PRAGMA secure_delete").fetchone() == (1,)
    assert database.execute("PRAGMA temp_store").fetchone() == (2,)


def test_threads_share_a_store(open_store: Open) -> None:
    store, errors = open_store(), []

    def work(start: int) -> None:
        try:
            for value in range(start, start + 20):
                store.add({"y": np.int64(value)})
                assert len(store.sample(3, value)["y"]) >= 1
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sorted(store.arrays()["y"].tolist()) == sorted(100 * i + j for i in range(4) for j in range(20))


def test_one_writer_at_a_time(open_store: Open, tmp_path: Path) -> None:
    store = open_store(timeout=0.05)
    store.add({"y": np.int64(1)})
    (path,) = (tmp_path / "store").glob("*.db")
    other = sqlite3.connect(path, isolation_level=None)
    try:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreBusyError, match="another process is writing"):
            store.add({"y": np.int64(2)})
        # Reading goes on.
        assert store.arrays()["y"].tolist() == [1]
        other.execute("ROLLBACK")
    finally:
        other.close()
    store.add({"y": np.int64(3)})
    assert store.arrays()["y"].tolist() == [1, 3]


def test_a_full_disk_changes_nothing(open_store: Open) -> None:
    store = open_store()
    store.add_many({"x": np.zeros((10, 4096), np.float32)})
    pages = store._database().execute("PRAGMA page_count").fetchone()[0]
    store._database().execute(f"PRAGMA max_page_count = {pages + 5}").fetchall()
    with pytest.raises(StoreError, match="the disk is full"):
        store.add_many({"x": np.ones((10, 4096), np.float32)})
    assert not store.arrays()["x"].any()
    assert len(store) == 10
    store._database().execute("PRAGMA max_page_count = 1000000").fetchall()
    assert store.add({"x": np.ones(4096, np.float32)}) == 11


ADDING = """
import sys
import numpy as np
from archipel.lite_runtime.store.example_store import ExampleStore
with ExampleStore.open(sys.argv[1], bytes(range(32)), max_age=None) as store:
    for value in range(int(sys.argv[2]), int(sys.argv[2]) + 30):
        print(store.add({"y": np.int64(value)}))
"""


@pytest.mark.sampled(every=3)
def test_several_processes(tmp_path: Path) -> None:
    children = [
        subprocess.Popen([sys.executable, "-c", ADDING, str(tmp_path), str(start)], stdout=subprocess.PIPE, text=True)
        for start in (0, 1000)
    ]
    printed = [list(map(int, child.communicate(timeout=60)[0].split())) for child in children]
    assert [child.returncode for child in children] == [0, 0]
    with ExampleStore.open(tmp_path, KEY) as store:
        assert sorted(printed[0] + printed[1]) == store.select().tolist() == list(range(1, 61))
        assert store.read(printed[0])["y"].tolist() == list(range(30))
        assert store.read(printed[1])["y"].tolist() == list(range(1000, 1030))


def test_a_path_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="file"):
        ExampleStore.open(tmp_path / "file", KEY)
