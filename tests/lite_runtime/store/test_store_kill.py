"""kill -9 while examples are added: what was acknowledged is there, whole, and the store goes on."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from archipel.lite_runtime.store.example_store import ExampleStore

KEY = bytes(range(32))
SIZE = 300 * 4 + 8 + 40
"""Sealed bytes of one example."""

# Adds without end, one example and thirteen in turns, and prints the last id of each add once it returned.
ADDING = """
import sys
import numpy as np
from archipel.lite_runtime.store.example_store import ExampleStore

store = ExampleStore.open(sys.argv[1], bytes(range(32)), max_bytes=int(sys.argv[2]), max_age=None)
first = int(store.select(limit=1)[-1]) + 1 if len(store) else 1
while True:
    count = 13 if first % 3 == 0 else 1
    y = np.arange(first, first + count)
    ids = store.add_many({"x": np.repeat(y.astype(np.float32)[:, None], 300, axis=1), "y": y})
    assert list(ids) == y.tolist(), (ids, y)
    first += count
    print(ids[-1], flush=True)
"""


def kill_once(folder: Path, max_bytes: int, seconds: float) -> int:
    """The last id that was acknowledged by a process killed so long after its first add."""
    child = subprocess.Popen(
        [sys.executable, "-c", ADDING, str(folder), str(max_bytes)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    last = child.stdout.readline()
    time.sleep(seconds)
    child.kill()
    whole = (last + child.communicate()[0]).rpartition("\n")[0]
    assert child.returncode == -9
    return int(whole.split()[-1])


def check(folder: Path, max_bytes: int, acknowledged: int) -> None:
    with ExampleStore.open(folder, KEY, max_bytes=max_bytes, max_age=None) as store:
        ids = store.select()
        # One more add may have been on disk before it was acknowledged, and an add is there as a whole.
        assert acknowledged <= ids[-1] <= acknowledged + 13
        kept = max_bytes // SIZE
        assert len(ids) == min(kept, ids[-1]) == len(store)
        np.testing.assert_array_equal(ids, np.arange(ids[-1] - len(ids) + 1, ids[-1] + 1))
        arrays = store.arrays()
        np.testing.assert_array_equal(arrays["y"], ids)
        np.testing.assert_array_equal(arrays["x"], np.repeat(ids.astype(np.float32)[:, None], 300, axis=1))
        (path,) = folder.glob("*.db")
        database = store._database()
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)], path


def run(folder: Path, max_bytes: int, kills: int) -> None:
    rng = random.Random(kills)
    before = 0
    for _ in range(kills):
        acknowledged = kill_once(folder, max_bytes, rng.uniform(0, 0.25))
        assert acknowledged > before
        check(folder, max_bytes, acknowledged)
        before = acknowledged


@pytest.mark.sampled(every=4)
def test_three_kills(tmp_path: Path) -> None:
    run(tmp_path, 200 * SIZE, kills=3)


@pytest.mark.slow
@pytest.mark.parametrize("max_bytes", [64 << 20, 50 * SIZE])
def test_twenty_kills(tmp_path: Path, max_bytes: int) -> None:
    run(tmp_path, max_bytes, kills=20)
