"""Hostile bytes: key files, layouts and databases raise documented errors, and nothing wrong is ever read."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from archipel.errors import StoreError, StoreKeyError
from archipel.lite_runtime.store.example_store import ExampleStore
from archipel.lite_runtime.store.keys import make_record, open_record
from archipel.lite_runtime.store.layout import Field, Layout

CORPUS = Path(__file__).parent / "corpus"
KEY = bytes(range(32))
ROWS = 400


def mutations(data: bytes, seed: int, count: int) -> Iterator[bytes]:
    rng = random.Random(seed)
    for _ in range(count):
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(len(changed))
            match rng.randrange(5):
                case 0:
                    changed[at] = rng.randrange(256)
                case 1:
                    changed[at] ^= 1 << rng.randrange(8)
                case 2:
                    del changed[at : at + rng.randrange(1, 20)]
                case 3:
                    changed[at:at] = rng.randbytes(rng.randrange(1, 20))
                case _:
                    changed[at : at + 4] = rng.choice((b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff"))
            changed = changed or bytearray(b"\0")
        yield bytes(changed)


@pytest.mark.parametrize("path", sorted(CORPUS.glob("key-*.bin")), ids=lambda path: path.stem)
def test_corpus_of_key_files(path: Path) -> None:
    with pytest.raises(StoreError):
        open_record(path.read_bytes(), KEY, path.name)


@pytest.mark.parametrize("path", sorted(CORPUS.glob("layout-*.json")), ids=lambda path: path.stem)
def test_corpus_of_layouts(path: Path) -> None:
    with pytest.raises(StoreError, match="example store"):
        Layout.decode(path.read_bytes())


def test_the_corpus_is_there() -> None:
    assert len(list(CORPUS.glob("key-*.bin"))) >= 4
    assert len(list(CORPUS.glob("layout-*.json"))) >= 10


def test_mutated_key_files() -> None:
    record = make_record(KEY, bytes(range(104)))
    assert open_record(record, KEY, "key").data_key == bytes(range(48, 80))
    for data in mutations(record, seed=1, count=1000):
        if data != record:
            with pytest.raises(StoreError):
                open_record(data, KEY, "key")


def test_mutated_layouts() -> None:
    layout = Layout({"x": Field("float32", (1, 28, 28)), "label": Field("int64", ())})
    good = 0
    for data in mutations(layout.encoded, seed=2, count=3000):
        try:
            decoded = Layout.decode(data)
        except StoreError:
            continue
        good += 1
        assert decoded.encoded == data
        assert decoded.nbytes <= 256 << 20
    assert good < 1000


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "store"
    with ExampleStore.open(folder, KEY, max_age=None, clock=lambda: 1_700_000_000.0) as store:
        store.add_many(data())
        store.remove([5, 6, 100])
    return folder


def data() -> dict[str, np.ndarray]:
    return {"x": np.arange(ROWS * 20, dtype=np.float32).reshape(ROWS, 20), "y": np.arange(ROWS)}


def use(folder: Path) -> bool:
    """Do everything with a store; whether all of it went well. Only documented errors, never another example."""
    try:
        store = ExampleStore.open(folder, KEY, max_age=10**9, max_bytes=ROWS * 128, timeout=0.1)
    except StoreError:
        return False
    fine = True
    expected = data()
    for step in (
        lambda: store.read(store.select()),
        lambda: store.sample(20, 1),
        lambda: next(store.batches(16, seed=2), {}),
        lambda: store.read([1, 2, 3]),
        lambda: store.add_many({name: array[-3:] for name, array in expected.items()}) and None,
        lambda: store.remove([1, 400]) and None,
        lambda: store.expire() and None,
        lambda: len(store) and store.nbytes and None,
    ):
        try:
            arrays = step()
        except StoreError:
            fine = False
            continue
        if arrays:
            np.testing.assert_array_equal(arrays["x"], expected["x"][arrays["y"]])
    try:
        store.close()
    except StoreError:
        fine = False
    return fine


def fuzz(template: Path, folder: Path, seed: int, count: int) -> None:
    (database,) = template.glob("*.db")
    whole = database.read_bytes()
    assert len(whole) % 16384 == 0
    rng = random.Random(seed)
    refused = 0
    for number in range(count):
        changed = bytearray(whole)
        for _ in range(rng.choice((1, 2, 10))):
            # The first bytes of a page say how to read the rest of it.
            page = rng.randrange(len(whole) // 16384) * 16384
            at = page + (rng.randrange(120) if rng.random() < 0.7 else rng.randrange(16384))
            changed[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        if rng.random() < 0.1:
            del changed[rng.randrange(len(changed)) :]
        target = folder / str(number)
        target.mkdir()
        shutil.copy(template / "store.key", target)
        (target / database.name).write_bytes(changed)
        refused += not use(target)
        ExampleStore.destroy(target)
        assert list(target.iterdir()) == []
    assert count // 5 < refused < count


def test_the_template_is_sound(template: Path, tmp_path: Path) -> None:
    shutil.copytree(template, tmp_path / "store")
    with ExampleStore.open(tmp_path / "store", KEY, max_age=None) as store:
        assert len(store) == ROWS - 3
    # Examples 5 and 6 are gone, so only asking for all that were ever there fails.
    assert use(tmp_path / "store")


@pytest.mark.sampled(every=3)
def test_mutated_databases(template: Path, tmp_path: Path) -> None:
    fuzz(template, tmp_path, seed=3, count=60)


@pytest.mark.slow
def test_many_mutated_databases(template: Path, tmp_path: Path) -> None:
    fuzz(template, tmp_path, seed=4, count=2000)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("path", sorted(CORPUS.glob("database-*.sql")), ids=lambda path: path.stem)
def test_corpus_of_databases(path: Path, template: Path, tmp_path: Path) -> None:
    """Statements that somebody ran on the database; kept as text."""
    folder = tmp_path / "store"
    shutil.copytree(template, folder)
    (database,) = folder.glob("*.db")
    connection = sqlite3.connect(database)
    connection.executescript(path.read_text())
    connection.close()
    assert not use(folder)


def test_a_key_of_another_store(template: Path, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    shutil.copytree(template, folder)
    (folder / "store.key").write_bytes(make_record(KEY, bytes(104)))
    with pytest.raises(StoreError), ExampleStore.open(folder, KEY) as store:
        store.arrays()
    (folder / "store.key").unlink()
    with pytest.raises(StoreKeyError):
        ExampleStore.open(folder, KEY)
