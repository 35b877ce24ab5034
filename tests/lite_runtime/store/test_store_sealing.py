"""What lies on the disk: read by a second implementation of the format, searched, and tampered with."""

from __future__ import annotations

import hashlib
import hmac
import json
import shutil
import sqlite3
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.cmac import CMAC

from archipel.errors import StoreError, StoreKeyError, StoreRecordError
from archipel.lite_runtime.store.example_store import ExampleStore
from archipel.lite_runtime.store.keys import StoreKeys
from archipel.lite_runtime.store.sealing import Sealer

KEY = bytes(range(32))


# --- the format, written anew: XAES-256-GCM on OpenSSL's CMAC, HKDF on HMAC ---


def open_sealed(key: bytes, sealed: bytes, associated: bytes) -> bytes:
    nonce = sealed[:24]
    derived = b""
    for counter in (1, 2):
        cmac = CMAC(AES(key))
        cmac.update(b"\0" + bytes([counter]) + b"X\0" + nonce[:12])
        derived += cmac.finalize()
    return AESGCM(derived).decrypt(nonce[12:], sealed[24:], associated)


def unwrap(record: bytes, key: bytes) -> bytes:
    extracted = hmac.digest(record[32:64], key, "sha256")
    wrapping = hmac.digest(extracted, b"archipel/example-store/1/wrap" + b"\1", "sha256")
    return open_sealed(wrapping, record[64:], record[:64])


def open_all(record: bytes, database: Path, key: bytes) -> list[tuple[int, int, bytes]]:
    """(id, time, bytes) of every example, and the layout is read on the way."""
    data_key, store = unwrap(record, key), record[16:32]
    connection = sqlite3.connect(database)
    try:
        layout = open_sealed(
            data_key, *connection.execute("SELECT layout FROM store").fetchone(),
            b"archipel/example-store/1/layout" + store,
        )  # fmt: skip
        rows = connection.execute("SELECT id, time, sealed FROM examples ORDER BY id").fetchall()
    finally:
        connection.close()
    digest = hashlib.sha256(layout).digest()
    names = [entry["name"] for entry in json.loads(layout)]
    assert names == sorted(names)
    place = b"archipel/example-store/1/example" + store + digest
    return [
        (id, time, open_sealed(data_key, sealed, place + id.to_bytes(8, "big") + time.to_bytes(8, "big")))
        for id, time, sealed in rows
    ]


@pytest.mark.parametrize(
    ("key", "associated", "sealed"),
    [
        (b"\1" * 32, b"", "ce546ef63c9cc60765923609b33a9a1974e96e52daf2fcf7075e2271"),
        (b"\3" * 32, b"c2sp.org/XAES-256-GCM", "986ec1832593df5443a179437fd083bf3fdb41abd740a21f71eb769d"),
    ],
)
def test_vectors_of_c2sp(key: bytes, associated: bytes, sealed: str) -> None:
    nonce = b"ABCDEFGHIJKLMNOPQRSTUVWX"
    assert Sealer(key).seal(nonce, b"XAES-256-GCM", associated) == nonce + bytes.fromhex(sealed)
    assert Sealer(key).open(nonce + bytes.fromhex(sealed), associated) == b"XAES-256-GCM"


@pytest.mark.sampled(every=3)
def test_accumulated_vector_of_c2sp() -> None:
    stream, at = hashlib.shake_128().digest(5_700_000), 0
    digest = hashlib.shake_128()

    def take(count: int) -> bytes:
        nonlocal at
        at += count
        return stream[at - count : at]

    for _ in range(10_000):
        key, nonce = take(32), take(24)
        message = take(take(1)[0])
        associated = take(take(1)[0])
        sealed = Sealer(key).seal(nonce, message, associated)
        assert Sealer(key).open(sealed, associated) == message
        digest.update(sealed[24:])
    assert at < len(stream)
    assert digest.hexdigest(32) == "e6b9edf2df6cec60c8cbd864e2211b597fb69a529160cd040d56c0c210081939"


def test_what_was_changed_does_not_open() -> None:
    sealer = Sealer(KEY)
    sealed = sealer.seal(bytes(24), b"message", b"place")
    for position in range(len(sealed)):
        changed = bytearray(sealed)
        changed[position] ^= 1
        with pytest.raises(InvalidTag):
            sealer.open(bytes(changed), b"place")
    for cut in range(len(sealed)):
        with pytest.raises(InvalidTag):
            sealer.open(sealed[:cut], b"place")
    with pytest.raises(InvalidTag):
        sealer.open(sealed, b"other")


# --- a whole store ---


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> Iterator[ExampleStore]:
    with ExampleStore.open(folder, KEY, clock=lambda: 1_700_000_123.9, max_age=None) as store:
        yield store


def numbers(count: int) -> dict[str, np.ndarray]:
    return {"x": np.arange(3 * count, dtype=np.float32).reshape(count, 3), "label": np.arange(count, dtype=np.int16)}


def database_of(folder: Path) -> Path:
    (path,) = folder.glob("*.db")
    return path


def change(folder: Path, *statements: str) -> None:
    connection = sqlite3.connect(database_of(folder))
    try:
        with connection:
            for statement in statements:
                connection.execute(statement)
    finally:
        connection.close()


def test_a_second_implementation_reads_the_files(store: ExampleStore, folder: Path) -> None:
    data = numbers(3)
    store.add_many(data)
    expected = [
        (i + 1, 1_700_000_123, data["label"][i].tobytes() + data["x"][i].tobytes()) for i in range(3)
    ]  # fmt: skip
    assert open_all((folder / "store.key").read_bytes(), database_of(folder), KEY) == expected
    with pytest.raises(InvalidTag):
        open_all((folder / "store.key").read_bytes(), database_of(folder), KEY[::-1])


SECRET = b"what the user typed, and nobody else may see"


def found(folder: Path, *needles: bytes) -> list[str]:
    return [
        f"{path.name}: {needle!r}"
        for path in sorted(folder.iterdir())
        for needle in needles
        if needle in path.read_bytes()
    ]


def test_no_file_shows_contents_or_names(store: ExampleStore, folder: Path) -> None:
    text = np.frombuffer(SECRET, np.uint8)
    needles = (SECRET[:16], SECRET[16:], b"keystrokes", KEY)
    ids = list(store.add_many({"keystrokes": np.tile(text, (50, 1))}))
    for _ in range(5):
        ids.append(store.add({"keystrokes": text}))
    assert {path.suffix for path in folder.iterdir()} == {".key", ".db", ".db-wal", ".db-shm"}
    assert found(folder, *needles) == []
    store.remove(ids[::2])
    store.sample(4, 0)
    assert found(folder, *needles) == []
    store.close()
    assert found(folder, *needles) == []
    # The search finds what SQLite keeps in the clear, in the database and in its log.
    plain = sqlite3.connect(folder / "plain.db")
    plain.execute("PRAGMA journal_mode = WAL")
    plain.execute("CREATE TABLE t (keystrokes BLOB)")
    plain.execute("INSERT INTO t VALUES (?)", (SECRET,))
    plain.commit()
    assert len(found(folder, *needles)) >= 3
    plain.close()


def test_equal_examples_look_different(store: ExampleStore, folder: Path) -> None:
    store.add_many({"x": np.zeros((200, 64), np.float32)})
    connection = sqlite3.connect(database_of(folder))
    sealed = [row[0] for row in connection.execute("SELECT sealed FROM examples")]
    connection.close()
    assert len({row[:24] for row in sealed}) == len({row[24:] for row in sealed}) == 200
    # Bits of a cipher's output are fair coins: 200 * 256 * 8 of them, five standard deviations.
    bits = np.unpackbits(np.frombuffer(b"".join(row[24:-16] for row in sealed), np.uint8))
    assert abs(bits.mean() - 0.5) < 5 * 0.5 / np.sqrt(bits.size)


def test_removed_rows_leave_the_files(store: ExampleStore, folder: Path) -> None:
    store.add_many(numbers(40))
    connection = sqlite3.connect(database_of(folder))
    sealed = dict(connection.execute("SELECT id, sealed FROM examples"))
    connection.close()
    store.remove([7, 8, 9])
    assert found(folder, *(sealed[id][24:40] for id in (7, 8, 9))) == []
    assert len(found(folder, sealed[10][24:40])) == 1


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.parametrize("key", [bytes(32), KEY[:-1] + b"\x1e", b"\xff" * 32])
def test_a_wrong_key_opens_nothing_and_changes_nothing(store: ExampleStore, folder: Path, key: bytes) -> None:
    store.add_many(numbers(3))
    store.close()
    before = digests(folder)
    with pytest.raises(StoreKeyError, match="does not open this store"):
        ExampleStore.open(folder, key, max_age=1)
    assert digests(folder) == before
    with ExampleStore.open(folder, KEY, max_age=None) as again:
        assert len(again) == 3


@pytest.mark.parametrize("key", [b"", KEY[:-1], KEY + b"\0", "a" * 32, None])
def test_a_key_that_is_none(tmp_path: Path, key: object) -> None:
    with pytest.raises(StoreKeyError, match="32 random bytes") as error:
        ExampleStore.open(tmp_path / "store", key)  # type: ignore[arg-type]
    assert KEY[:-1].hex() not in str(error.value)
    assert not (tmp_path / "store").exists()


def test_keys_do_not_print_themselves() -> None:
    assert "72656" not in repr(StoreKeys(b"record", b"id", b"reveal"))
    assert "reveal" not in repr(StoreKeys(b"record", b"id", b"reveal"))


def test_every_changed_byte_of_the_key_file_is_seen(store: ExampleStore, folder: Path) -> None:
    store.add_many(numbers(1))
    store.close()
    path, record = folder / "store.key", (folder / "store.key").read_bytes()
    assert len(record) == 136
    for position in range(len(record)):
        path.write_bytes(record[:position] + bytes([record[position] ^ 0x10]) + record[position + 1 :])
        with pytest.raises(StoreError, match=r"store\.key"):
            ExampleStore.open(folder, KEY)
    for data in (b"", record[:-1], record + b"\0"):
        path.write_bytes(data)
        with pytest.raises(StoreError, match="not the key file"):
            ExampleStore.open(folder, KEY)
    path.write_bytes(b"archipel-store-2" + record[16:])
    with pytest.raises(StoreError, match="format b'2' of example stores is not known"):
        ExampleStore.open(folder, KEY)
    path.write_bytes(record)
    ExampleStore.open(folder, KEY).close()


def test_every_changed_byte_of_a_record_is_seen_and_the_others_stay_readable(store: ExampleStore, folder: Path) -> None:
    data = numbers(3)
    store.add_many(data)
    connection = sqlite3.connect(database_of(folder), isolation_level=None)
    sealed = connection.execute("SELECT sealed FROM examples WHERE id = 2").fetchone()[0]
    assert len(sealed) == 14 + 40
    for position in range(len(sealed)):
        changed = sealed[:position] + bytes([sealed[position] ^ 0x80]) + sealed[position + 1 :]
        connection.execute("UPDATE examples SET sealed = ? WHERE id = 2", (changed,))
        with pytest.raises(StoreRecordError, match="example 2 was damaged or tampered with") as error:
            store.arrays()
        assert error.value.id == 2
        assert store.read([1, 3])["label"].tolist() == [0, 2]
    connection.execute("UPDATE examples SET sealed = ? WHERE id = 2", (sealed,))
    assert store.arrays()["label"].tolist() == [0, 1, 2]
    connection.execute("UPDATE examples SET sealed = x'00' WHERE id = 2")
    connection.close()
    store.remove([2])
    assert store.arrays()["label"].tolist() == [0, 2]


def test_a_changed_byte_in_the_file_spoils_one_example(store: ExampleStore, folder: Path) -> None:
    store.add_many(numbers(30))
    connection = sqlite3.connect(database_of(folder))
    sealed = connection.execute("SELECT sealed FROM examples WHERE id = 11").fetchone()[0]
    connection.close()
    store.close()
    path = database_of(folder)
    data = bytearray(path.read_bytes())
    data[data.index(sealed) + 30] ^= 1
    path.write_bytes(data)
    with ExampleStore.open(folder, KEY, max_age=None) as again:
        with pytest.raises(StoreRecordError) as error:
            again.arrays()
        again.remove([error.value.id])
        assert again.arrays()["label"].tolist() == [*range(10), *range(11, 30)]


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE examples SET time = time + 1 WHERE id = 2",
        "UPDATE examples SET time = 'never' WHERE id = 2",
        "UPDATE examples SET time = 1e300 WHERE id = 2",
        "UPDATE examples SET sealed = (SELECT sealed FROM examples WHERE id = 1) WHERE id = 2",
        "UPDATE examples SET sealed = substr(sealed, 1, 53) WHERE id = 2",
        "UPDATE examples SET sealed = 'text' WHERE id = 2",
        "UPDATE examples SET sealed = CAST(sealed AS TEXT) WHERE id = 2",
    ],
)
def test_rows_cannot_be_moved_or_exchanged(store: ExampleStore, folder: Path, statement: str) -> None:
    store.add_many(numbers(3))
    change(folder, statement)
    with pytest.raises(StoreRecordError, match="example 2 was damaged") as error:
        store.read([1, 2, 3])
    assert error.value.id == 2
    assert store.read([3, 1])["label"].tolist() == [2, 0]


def test_a_huge_row_is_not_loaded(store: ExampleStore, folder: Path) -> None:
    store.add_many(numbers(3))
    change(folder, "UPDATE examples SET sealed = zeroblob(20000000) WHERE id = 2")
    tracemalloc.start()
    try:
        with pytest.raises(StoreRecordError, match="example 2 was damaged"):
            store.arrays()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_rows_of_one_id_cannot_be_given_to_another(store: ExampleStore, folder: Path) -> None:
    store.add_many(numbers(3))
    change(folder, "UPDATE examples SET id = 9 WHERE id = 2")
    with pytest.raises(StoreRecordError, match="example 9 was damaged"):
        store.arrays()


def test_rows_of_another_store_do_not_open(store: ExampleStore, folder: Path, tmp_path: Path) -> None:
    store.add_many(numbers(2))
    store.close()
    with ExampleStore.open(tmp_path / "other", KEY, clock=lambda: 1_700_000_123.9, max_age=None) as other:
        other.add_many(numbers(2))
    # The other store's database under this store's name, and then with this store's id written into it.
    shutil.copy(database_of(tmp_path / "other"), database_of(folder))
    with pytest.raises(StoreError, match="belongs to another store"):
        ExampleStore.open(folder, KEY)
    id = (folder / "store.key").read_bytes()[16:32].hex()
    change(folder, f"UPDATE store SET id = x'{id}'")
    with pytest.raises(StoreError, match="layout of the examples was damaged or tampered with"):
        ExampleStore.open(folder, KEY)


@pytest.mark.parametrize(
    ("statements", "message"),
    [
        (["CREATE TRIGGER t AFTER INSERT ON examples BEGIN DELETE FROM store; END"], "other tables"),
        (["ALTER TABLE examples RENAME TO real", "CREATE VIEW examples AS SELECT * FROM real"], "other tables"),
        (["DROP INDEX examples_by_time"], "other tables"),
        (["PRAGMA user_version = 2"], "format 2 of example stores is not known here"),
        (["PRAGMA application_id = 0"], "not the database of an example store"),
        (["UPDATE store SET layout = NULL"], "examples without a layout"),
        (["UPDATE store SET layout = 'text'"], "layout of the examples"),
        (["UPDATE store SET layout = zeroblob(20000000)"], "layout of the examples"),
        (["DELETE FROM store"], "belongs to another store"),
        (["INSERT INTO examples VALUES (9223372036854775807, 0, x'')"], "tampered with"),
        (["UPDATE store SET next = 9223372036854775807"], "tampered with"),
    ],
)
def test_a_database_that_is_not_as_it_was_made(
    store: ExampleStore, folder: Path, statements: list[str], message: str
) -> None:
    store.add_many(numbers(3))
    store.close()
    change(folder, *statements)
    with pytest.raises(StoreError, match=message):
        ExampleStore.open(folder, KEY, max_age=None)


def test_a_wrong_count_is_put_right(store: ExampleStore, folder: Path) -> None:
    store.add_many(numbers(3))
    store.close()
    change(folder, "UPDATE store SET count = 'many', next = 1")
    with ExampleStore.open(folder, KEY, max_bytes=4 * 54, max_age=None) as again:
        assert len(again) == 3
        assert again.add_many(numbers(2)) == range(4, 6)
        assert again.select().tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("damage", [lambda data: b"x" * len(data), lambda data: data[:100], lambda data: data[:40000]])
def test_a_database_that_is_none(store: ExampleStore, folder: Path, damage: Callable[[bytes], bytes]) -> None:
    store.add_many(numbers(3000))
    store.close()
    path = database_of(folder)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(StoreError, match=r"SQLite: .*ExampleStore\.destroy"):
        ExampleStore.open(folder, KEY, max_age=None).arrays()
    ExampleStore.destroy(folder)
    assert list(folder.iterdir()) == []
