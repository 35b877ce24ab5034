"""The example store: what a device has learned from so far and may learn from again, encrypted on its disk.

An app adds examples as they happen; training samples them; the oldest go when the store is full or they are too old.
On disk there is one random data key, wrapped under a key that the caller keeps (store_keys.py), and an SQLite
database whose rows are sealed one by one under the data key (store_sealing.py), each bound to its place: store, layout,
id and time. Row ids, times in whole seconds, the size of an example and their number are in the clear.
"""

from __future__ import annotations

import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import numpy as np

from archipel.durable import make_folder, sweep
from archipel.errors import (
    RuntimeInputError,
    RuntimeLimitError,
    StoreErasedError,
    StoreError,
    StoreQuotaError,
)
from archipel.lite_runtime import shuffle
from archipel.lite_runtime.store.database import example_ids, open_database, translated
from archipel.lite_runtime.store.files import database_path, erase, finish_erasing, load_keys, locked
from archipel.lite_runtime.store.keys import KEY_FILE, StoreKeys, check_key, read_record
from archipel.lite_runtime.store.layout import Field, Layout, batch_of
from archipel.lite_runtime.store.quotas import Quotas, count_examples, recount
from archipel.lite_runtime.store.records import Records, sealed_bytes

MAX_TIME = 1 << 62

_WORTH_SHRINKING_BYTES = 1 << 20
_SECOND = timedelta(seconds=1)


class ExampleStore:
    """Made by `ExampleStore.open`. Threads may share one; a process that was forked opens its own.

    Every method raises StoreError or one of its children: StoreErasedError once somebody erased the store,
    StoreBusyError where another process writes for longer than the timeout.
    """

    def __init__(
        self,
        folder: Path,
        keys: StoreKeys,
        database: sqlite3.Connection,
        quotas: Quotas,
        clock: Callable[[], float],
        timeout: float,
    ) -> None:
        self.path = folder
        self._record = keys.record
        self._records = Records(keys)
        self._open: sqlite3.Connection | None = database
        self._quotas = quotas
        self._clock = clock
        self._timeout = timeout
        self._known_layout: Layout | None = None
        self._process = os.getpid()
        self._lock = threading.RLock()

    @classmethod
    def open(
        cls,
        path: Path | str,
        key: bytes,
        *,
        max_bytes: int = 64 << 20,
        max_age: timedelta | float | None = timedelta(days=30),
        clock: Callable[[], float] = time.time,
        timeout: float = 10.0,
    ) -> ExampleStore:
        """Open the store in the folder `path`, made if it is not there, and let go of what is over the quotas.

        `key`: 32 random bytes that the caller keeps, for instance in the system's key store; `max_bytes` for all
        sealed examples together; `max_age` in seconds if it is a number; `clock` gives seconds since 1970; `timeout`
        in seconds for other processes. The quotas are those of this opening, they are not kept. An erase that was
        interrupted is finished first. Raises StoreKeyError, with nothing changed, if the key is not the store's.
        """
        key = check_key(key)
        age = max_age / _SECOND if isinstance(max_age, timedelta) else max_age
        if max_bytes < 1 or (age is not None and not age > 0):
            raise StoreError(f"example store: quotas must be above 0, got max_bytes={max_bytes}, max_age={max_age}")
        folder = Path(path)
        with translated(folder):
            make_folder(folder, 0o700)
            with locked(folder, timeout):
                finish_erasing(folder)
                keys = load_keys(folder, key)
                database = open_database(database_path(folder, keys.store), keys.store, timeout)
        store = cls(folder, keys, database, Quotas(max_bytes, age), clock, timeout)
        try:
            store._settle()
        except BaseException:
            store.close()
            raise
        return store

    @staticmethod
    def destroy(path: Path | str, *, timeout: float = 10.0) -> None:
        """Erase the store in the folder `path` without its key, as `erase` does. Nothing happens if there is none."""
        folder = Path(path)
        with translated(folder):
            if folder.is_dir():
                with locked(folder, timeout):
                    sweep(folder, KEY_FILE)
                    erase(folder)

    @property
    def fields(self) -> dict[str, Field]:
        """dtype and shape of each field of an example; empty before the first example, which fixes them."""
        with self._reading() as database:
            layout = self._layout(database)
            return dict(layout.fields) if layout else {}

    @property
    def nbytes(self) -> int:
        """Sealed bytes of all examples: what `max_bytes` counts. The file is a few per cent larger."""
        with self._reading() as database:
            layout = self._layout(database)
            return count_examples(database) * sealed_bytes(layout) if layout else 0

    def __len__(self) -> int:
        with self._reading() as database:
            return count_examples(database)

    def add(self, example: Mapping[str, np.ndarray]) -> int:
        """Add one example, arrays without batch axis by field name; returns its id. On disk when this returns.

        Raises RuntimeInputError if the fields, dtypes or shapes are not those of the first example.
        """
        return self._add(batch_of(example, single=True))[0]

    def add_many(self, examples: Mapping[str, np.ndarray]) -> range:
        """Add `n` examples, arrays `[n, ...]` by field name, all or none; returns their ids.

        The oldest examples make room. Raises StoreQuotaError if these alone are larger than the quota.
        """
        return self._add(batch_of(examples, single=False))

    def select(self, *, since: float | None = None, until: float | None = None, limit: int | None = None) -> np.ndarray:
        """Ids in the order of adding, int64 `[n]`; decrypts nothing.

        `since <= time < until` in seconds since 1970, kept as whole seconds; of those the newest `limit`.
        """
        with self._reading() as database:
            return example_ids(database, since, until, limit)

    def read(self, ids: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """The examples `ids`, in this order: `[n, ...]` by field name.

        Raises StoreRecordError, which names the example, for one that is not there, or was damaged or tampered with;
        the others stay readable.
        """
        with self._reading() as database:
            return self._records.read(database, self._need_layout(database), _id_array(ids))

    def arrays(self, *, limit_bytes: int = 256 << 20) -> dict[str, np.ndarray]:
        """All examples, `[n, ...]` by field name, in the order of adding.

        Raises RuntimeLimitError before anything is read if they are more than `limit_bytes` in memory.
        """
        with self._reading() as database:
            ids = example_ids(database)
            layout = self._need_layout(database)
            total = len(ids) * layout.nbytes
            if total > limit_bytes:
                raise RuntimeLimitError(
                    f"example store: {len(ids)} examples are {total} bytes in memory, the limit is {limit_bytes}; "
                    "take a sample(), go through batches(), or raise limit_bytes"
                )
            return self._records.read(database, layout, ids)

    def sample(self, count: int, seed: int, *, ids: Sequence[int] | np.ndarray | None = None) -> dict[str, np.ndarray]:
        """`count` examples drawn without replacement, all equally likely, `[count, ...]` by field name.

        Fewer where the store (or `ids`) has fewer. The same ids and seed give the same examples in the same order: the
        first ones of `shuffle.permutation(n, seed, 0, 0)`. Only these are read and decrypted.
        """
        if count < 1:
            raise RuntimeInputError(f"example store: sample at least 1 example, got count={count}")
        _check_seed(seed)
        with self._reading() as database:
            given = example_ids(database) if ids is None else _id_array(ids)
            chosen = given[shuffle.permutation(len(given), seed, 0, 0)[:count]]
            return self._records.read(database, self._need_layout(database), chosen)

    def batches(
        self,
        batch_size: int,
        *,
        epochs: int = 1,
        shuffled: bool = True,
        seed: int = 0,
        ids: Sequence[int] | np.ndarray | None = None,
    ) -> Iterator[dict[str, np.ndarray]]:
        """Go through the store in batches `[batch_size, ...]` by field name, in the order in which `fit` would.

        The examples are those that are there now. One that goes while the iteration runs (removed, too old) is left
        out of its batch. The last batch of an epoch is smaller.
        """
        if batch_size < 1 or epochs < 0:
            raise RuntimeInputError(f"example store: batch_size from 1, epochs from 0; got {batch_size}, {epochs}")
        _check_seed(seed)
        given = self.select() if ids is None else _id_array(ids)
        if not len(given):
            return iter(())
        order = shuffle.batches(
            len(given), batch_size, epochs=epochs, steps=None, shuffle=shuffled, seed=seed, phase=0, whole=False
        )
        return self._batches(given, order)

    def remove(self, ids: Sequence[int] | np.ndarray) -> int:
        """Remove these examples and return how many were there. Their bytes are overwritten in the file.

        Copies that the disk or a backup keeps can still be opened with the store's key; only `erase` ends that.
        """
        wanted = _id_array(ids)
        with self._writing() as database:
            removed = 0
            for id in wanted:
                removed += database.execute("DELETE FROM examples WHERE id = ?", (int(id),)).rowcount
            database.execute("UPDATE store SET count = count - ?", (removed,))
        self._shrink()
        return removed

    def expire(self) -> int:
        """Remove what is too old or over the quota, and return how many. Every other method does it too when due."""
        with self._writing() as database:
            removed = self._trim(database)
        self._shrink()
        return removed

    def erase(self) -> None:
        """Destroy the store's key, then remove its files, and close. Also other processes can read it no more.

        A process that is killed meanwhile leaves the store whole or erased, never half. Afterwards neither the caller's
        key nor a copy of the database opens anything, unless somebody kept a copy of `store.key` too.
        """
        self.close()
        self.destroy(self.path, timeout=self._timeout)

    def close(self) -> None:
        with self._lock:
            database, self._open = self._open, None
            if database is not None and self._process == os.getpid():
                with translated(self.path):
                    database.close()

    def __enter__(self) -> ExampleStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ExampleStore({str(self.path)!r}{'' if self._open else ', closed'})"

    def _add(self, batch: dict[str, np.ndarray]) -> range:
        if not batch:
            raise RuntimeInputError("example store: an example without fields; give at least one array")
        with self._writing() as database:
            layout = self._layout(database) or Layout.of(batch)
            count = layout.check(batch)
            size = sealed_bytes(layout)
            if count * size > self._quotas.max_bytes:
                raise StoreQuotaError(
                    f"example store: {count} examples of {size} sealed bytes are larger than the whole quota of "
                    f"{self._quotas.max_bytes} bytes; raise max_bytes, or add fewer"
                )
            if self._known_layout is None:
                self._records.write_layout(database, layout)
            now = self._now()
            first = database.execute("SELECT next FROM store").fetchone()[0]
            self._quotas.trim(database, now, layout, count)
            self._records.write(database, layout, batch, range(first, first + count), now)
            database.execute("UPDATE store SET next = next + ?, count = count + ?", (count, count))
        self._known_layout = layout
        return range(first, first + count)

    def _batches(self, ids: np.ndarray, order: Iterator[shuffle.Batch]) -> Iterator[dict[str, np.ndarray]]:
        for batch in order:
            with self._reading() as database:
                layout = self._need_layout(database)
                arrays = self._records.read(database, layout, ids[batch.indices], skip_missing=True)
            if len(next(iter(arrays.values()))):
                yield arrays

    def _layout(self, database: sqlite3.Connection) -> Layout | None:
        if self._known_layout is None:
            self._known_layout = self._records.read_layout(database)
        return self._known_layout

    def _need_layout(self, database: sqlite3.Connection) -> Layout:
        layout = self._layout(database)
        if layout is None:
            raise StoreError(f"{self.path}: the store has no examples yet; add() some first")
        return layout

    def _now(self) -> int:
        now = self._clock()
        if not math.isfinite(now) or abs(now) >= MAX_TIME:
            raise StoreError(f"example store: the clock gave {now}, expected seconds since 1970")
        return math.floor(now)

    def _settle(self) -> None:
        with self._writing() as database:
            count = recount(database)
            if self._layout(database) is None and count:
                raise StoreError(f"{self.path}: examples without a layout: the database was tampered with")
            removed = self._trim(database)
        if removed:
            self._shrink()

    def _trim(self, database: sqlite3.Connection) -> int:
        return self._quotas.trim(database, self._now(), self._layout(database))

    def _shrink(self) -> None:
        """Give free pages back to the file system, and empty the log, where removed rows would stay a while."""
        with self._lock, translated(self.path):
            database = self._database()
            free, size = (database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("freelist_count", "page_size"))
            if free * size >= _WORTH_SHRINKING_BYTES:
                # As a script, because this pragma works as long as it is stepped and execute() stops at the first page.
                database.executescript("PRAGMA incremental_vacuum")
            # Where another process is reading, it answers "busy" and the next one does it.
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _database(self) -> sqlite3.Connection:
        if self._open is None:
            raise StoreError(f"{self.path}: the store is closed; ExampleStore.open() opens it")
        if self._process != os.getpid():
            raise StoreError(f"{self.path}: opened before a fork; open the store in this process")
        return self._open

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction, the only one that writes. It ends on disk, or changes nothing."""
        with self._transaction("BEGIN IMMEDIATE") as database:
            yield database

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """One state of the database for everything that is read, without examples that are too old."""
        with self._lock:
            with translated(self.path):
                due = self._quotas.is_due(self._database(), self._now())
            if due:
                self.expire()
            with self._transaction("BEGIN") as database:
                yield database

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        with self._lock, translated(self.path):
            database = self._database()
            database.execute(begin)
            try:
                # After BEGIN: what is written here was begun before the store was erased, or is refused.
                if read_record(self.path) != self._record:
                    raise StoreErasedError(f"{self.path}: the store was erased, or its key file changed")
                yield database
                database.execute("COMMIT")
            except BaseException as error:
                if database.in_transaction:
                    database.execute("ROLLBACK")
                if isinstance(error, StoreErasedError):
                    self.close()
                raise


def _id_array(ids: Sequence[int] | np.ndarray) -> np.ndarray:
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise RuntimeInputError(
            f"example store: ids must be integers [n], got {array.dtype}{list(array.shape)}; select() gives some"
        )
    return array.astype(np.int64)


def _check_seed(seed: int) -> None:
    if not 0 <= seed < 1 << 32:
        raise RuntimeInputError(f"example store: seed must be from 0 to 2**32 - 1, got {seed}")
