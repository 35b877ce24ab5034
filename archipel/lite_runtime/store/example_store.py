"""The example store: the examples that a device learns from, encrypted on its disk.

An app adds examples as they happen, and training samples them. The store removes the oldest when it is full, and those
that are too old. On disk lie one random data key, wrapped under a key that the caller keeps (keys.py), and an SQLite
database whose rows are sealed one by one under the data key (sealing.py), each bound to its place: store, layout, id
and time. Row ids, times in whole seconds, the size of an example and their number are in the clear.
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
from archipel.errors import RuntimeInputError, RuntimeLimitError, StoreErasedError, StoreError, StoreQuotaError
from archipel.lite_runtime import shuffle
from archipel.lite_runtime.store.database import example_ids, give_back_pages, open_database, translate_errors
from archipel.lite_runtime.store.files import database_path, erase, finish_erasing, hold_lock, load_keys
from archipel.lite_runtime.store.keys import KEY_FILE, StoreKeys, check_key, read_record
from archipel.lite_runtime.store.layout import Field, Layout, batch_of
from archipel.lite_runtime.store.quotas import Quotas, count_examples, recount
from archipel.lite_runtime.store.records import Records, sealed_bytes
from archipel.permutations import permutation

MAX_TIME = 1 << 62

_SECOND = timedelta(seconds=1)


class ExampleStore:
    """An open store; `ExampleStore.open` makes one. Threads may share it; a forked process opens its own.

    Every method raises StoreError or one of its children: StoreErasedError after somebody erased the store,
    StoreBusyError when another process writes for longer than the timeout.

    Example:
        with ExampleStore.open("examples", os.urandom(32)) as store:
            store.add({"input": x[0], "label": y[0]})
            runtime.fit(store.sample(256, seed=0))
    """

    def __init__(
        self, folder: Path, keys: StoreKeys, database: sqlite3.Connection, quotas: Quotas,
        clock: Callable[[], float], timeout: float,
    ) -> None:  # fmt: skip
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
        """Open the store in the folder `path`, finish an interrupted erase, and remove what is over the quotas.

        Arguments:
            path: the folder, made if it is not there.
            key: 32 random bytes that the caller keeps, for instance in the system's key store.
            max_bytes: for all sealed examples together. The quotas are not stored; every opening sets them.
            max_age: a timedelta or seconds; None: any age.
            clock: returns seconds since 1970.
            timeout: seconds to wait for other processes.

        Raises StoreKeyError, with nothing changed, if the key is not the store's.
        """
        key = check_key(key)
        age = max_age / _SECOND if isinstance(max_age, timedelta) else max_age
        if max_bytes < 1 or (age is not None and not age > 0):
            raise StoreError(f"example store: quotas must be above 0, got max_bytes={max_bytes}, max_age={max_age}")
        folder = Path(path)
        with translate_errors(folder):
            make_folder(folder, 0o700)
            with hold_lock(folder, timeout):
                # Before the keys: a half-erased folder has no key file, and load_keys would refuse its database.
                finish_erasing(folder)
                keys = load_keys(folder, key)
                database = open_database(database_path(folder, keys.store), keys.store, timeout)
        store = cls(folder, keys, database, Quotas(max_bytes, age), clock, timeout)
        # Outside the folder's lock: a transaction keeps other processes away from the database.
        try:
            store._settle()
        except BaseException:
            store.close()
            raise
        return store

    @staticmethod
    def destroy(path: Path | str, *, timeout: float = 10.0) -> None:
        """Erase the store in the folder `path`, as `erase` does, without its key. Does nothing if there is no store."""
        folder = Path(path)
        with translate_errors(folder):
            if folder.is_dir():
                with hold_lock(folder, timeout):
                    sweep(folder, KEY_FILE)
                    erase(folder)

    @property
    def fields(self) -> dict[str, Field]:
        """The dtype and shape of each field of an example; {} before the first example, which fixes them."""
        with self._reading() as database:
            layout = self._layout(database)
            return dict(layout.fields) if layout else {}

    @property
    def nbytes(self) -> int:
        """The sealed bytes of all examples, which `max_bytes` limits. The file is a few per cent larger."""
        with self._reading() as database:
            layout = self._layout(database)
            return count_examples(database) * sealed_bytes(layout) if layout else 0

    def __len__(self) -> int:
        with self._reading() as database:
            return count_examples(database)

    def add(self, example: Mapping[str, np.ndarray]) -> int:
        """Add one example, arrays without batch axis by field name, and return its id. It is on disk then.

        Raises RuntimeInputError if the fields, dtypes or shapes are not those of the first example.
        """
        return self._add(batch_of(example, single=True))[0]

    def add_many(self, examples: Mapping[str, np.ndarray]) -> range:
        """Add `n` examples, arrays `[n, ...]` by field name, all or none; returns their ids.

        The oldest examples make room. Raises StoreQuotaError if these alone are larger than the quota.
        """
        return self._add(batch_of(examples, single=False))

    def select(self, *, since: float | None = None, until: float | None = None, limit: int | None = None) -> np.ndarray:
        """Ids in the order of adding, int64 `[n]`, of the newest `limit` examples with `since <= time < until`.

        Times are seconds since 1970; the store keeps whole seconds. Decrypts nothing.
        """
        with self._reading() as database:
            return example_ids(database, since, until, limit)

    def read(self, ids: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """The examples `ids`, in this order: `[n, ...]` by field name.

        Raises StoreRecordError, which names the example that is missing or was damaged; the others stay readable.
        """
        with self._reading() as database:
            return self._records.read(database, self._need_layout(database), _id_array(ids))

    def arrays(self, *, limit_bytes: int = 256 << 20) -> dict[str, np.ndarray]:
        """All examples, `[n, ...]` by field name, in the order of adding.

        Raises RuntimeLimitError, before reading any, if they take more than `limit_bytes` in memory.
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

        If the store (or `ids`) has fewer, all of them. The same ids and seed give the same examples in the same order:
        the first of `permutation(n, seed, 0, 0)`. Reads and decrypts only these. Raises RuntimeInputError for a `count`
        below 1.
        """
        if count < 1:
            raise RuntimeInputError(f"example store: sample at least 1 example, got count={count}")
        _check_seed(seed)
        with self._reading() as database:
            given = example_ids(database) if ids is None else _id_array(ids)
            chosen = given[permutation(len(given), seed, 0, 0)[:count]]
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

        Takes the examples that are there now. A batch leaves out those that are removed, or become too old, before it
        is read. The last batch of an epoch may be smaller. `ids`: only these; `seed` (0 to 2**32 - 1) decides the
        order where it is `shuffled`. Raises RuntimeInputError for other numbers.
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

        The store's key still opens copies that the disk or a backup keeps; only `erase` prevents that.
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
        """Remove examples that are too old or over the quota, and return how many. Reading and adding do so too."""
        with self._writing() as database:
            removed = self._trim(database)
        self._shrink()
        return removed

    def erase(self) -> None:
        """Close, destroy the store's key, then remove its files. Other processes cannot read it any more either.

        If the process is killed meanwhile, the store is whole or erased. Afterwards the caller's key and a copy of the
        database open nothing, unless somebody kept a copy of `store.key` too.
        """
        self.close()
        self.destroy(self.path, timeout=self._timeout)

    def close(self) -> None:
        """Close the store; calls after that raise StoreError."""
        with self._lock:
            database, self._open = self._open, None
            # SQLite forbids a fork to use its parent's connection, even to close it.
            if database is not None and self._process == os.getpid():
                with translate_errors(self.path):
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
            # Room is made in the same transaction, so an error or a kill loses no old example for nothing.
            self._quotas.trim(database, now, layout, count)
            self._records.write(database, layout, batch, range(first, first + count), now)
            database.execute("UPDATE store SET next = next + ?, count = count + ?", (count, count))
        # Only after the commit: a rolled-back layout must not be remembered.
        self._known_layout = layout
        return range(first, first + count)

    def _batches(self, ids: np.ndarray, order: Iterator[shuffle.Batch]) -> Iterator[dict[str, np.ndarray]]:
        for batch in order:
            # A transaction for each batch: one for all would hold back writers' checkpoints while training runs.
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
            # The counters come from the file, which anybody may have changed.
            count = recount(database)
            if self._layout(database) is None and count:
                raise StoreError(f"{self.path}: examples without a layout: the database was tampered with")
            removed = self._trim(database)
        if removed:
            self._shrink()

    def _trim(self, database: sqlite3.Connection) -> int:
        return self._quotas.trim(database, self._now(), self._layout(database))

    def _shrink(self) -> None:
        with self._lock, translate_errors(self.path):
            give_back_pages(self._database())

    def _database(self) -> sqlite3.Connection:
        if self._open is None:
            raise StoreError(f"{self.path}: the store is closed; ExampleStore.open() opens it")
        if self._process != os.getpid():
            raise StoreError(f"{self.path}: opened before a fork; open the store in this process")
        return self._open

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A write transaction, the only one at a time. It is on disk at the end, or has changed nothing."""
        with self._transaction("BEGIN IMMEDIATE") as database:
            yield database

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """A read transaction: one consistent state of the database, without examples that are too old."""
        with self._lock:
            # Trimming writes, so it comes before the read transaction and not inside it.
            with translate_errors(self.path):
                due = self._quotas.is_due(self._database(), self._now())
            if due:
                self.expire()
            with self._transaction("BEGIN") as database:
                yield database

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        with self._lock, translate_errors(self.path):
            database = self._database()
            database.execute(begin)
            try:
                # After BEGIN, or an erase could come in between: no transaction begins on an erased store.
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
