"""Measures the database and the file store from outside: they know nothing of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import IntegrityError, OperationalError

from archipel.server.database.engine import Database
from archipel.server.storage import Storage
from archipel.server.storage.received import Written
from archipel.server.telemetry.measures import Measures

T = TypeVar("T")
_OPERATIONS = ("select", "insert", "update", "delete")
_MOST_KEPT = 100_000


def watch_database(database: Database, measures: Measures) -> None:
    """Measure each statement and each writing transaction of this process."""
    observers = {name: measures.statement_seconds.labels(name).observe for name in (*_OPERATIONS, "other")}
    ended: deque[tuple[str, float]] = deque(maxlen=_MOST_KEPT)
    database.on_write = measures.write_seconds.observe

    def before(connection: Any, cursor: Any, statement: str, values: Any, context: Any, many: bool) -> None:
        context.archipel_began = time.perf_counter()

    def after(connection: Any, cursor: Any, statement: str, values: Any, context: Any, many: bool) -> None:
        ended.append((statement[:6], time.perf_counter() - context.archipel_began))

    def write() -> None:
        for _ in range(len(ended)):
            operation, seconds = ended.popleft()
            (observers.get(operation.lower()) or observers["other"])(seconds)

    def failed(context: ExceptionContext) -> None:
        measures.database_errors.labels(_kind_of(context)).inc()

    measures.at_flush(write)
    for engine in database.engines:
        event.listen(engine, "before_cursor_execute", before)
        event.listen(engine, "after_cursor_execute", after)
        event.listen(engine, "handle_error", failed)


def _kind_of(context: ExceptionContext) -> str:
    if context.is_disconnect:
        return "disconnected"
    if isinstance(context.sqlalchemy_exception, IntegrityError):
        return "integrity"  # two processes that insert the same row at the same moment, which is no fault
    return "operational" if isinstance(context.sqlalchemy_exception, OperationalError) else "other"


class WatchedStorage:
    """A store that measures another one: how long it takes, and how often it fails.

    A missing file is no failure: many callers ask only whether it is there.
    """

    def __init__(self, storage: Storage, measures: Measures) -> None:
        self._storage = storage
        names = ("check", "receive", "keep", "read", "hold", "remove")
        self._seconds = {name: measures.storage_seconds.labels(name) for name in names}
        self._errors = {name: measures.storage_errors.labels(name) for name in names}

    @contextmanager
    def _watch(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception:
            self._errors[name].inc()
            raise
        finally:
            self._seconds[name].observe(time.perf_counter() - began)

    def _measured(self, name: str, work: Callable[[], T]) -> T:
        with self._watch(name):
            return work()

    def prepare(self) -> None:
        self._storage.prepare()

    def check(self) -> None:
        self._measured("check", self._storage.check)

    def make_folder(self, folder: str) -> None:
        self._storage.make_folder(folder)

    def receive(self, folder: str, chunks: Iterable[bytes], *, named: bool = True) -> Written:
        source = _Chunks(chunks)
        began = time.perf_counter()
        try:
            return self._storage.receive(folder, source, named=named)
        except FileNotFoundError:
            raise
        except Exception:
            # A sender that goes away is no failure of the store.
            if not source.failed:
                self._errors["receive"].inc()
            raise
        finally:
            # Without the time in which the sender was waited for.
            self._seconds["receive"].observe(time.perf_counter() - began - source.waited)

    def keep(self, written: Written, key: str, *, reread: bool = False) -> None:
        self._measured("keep", lambda: self._storage.keep(written, key, reread=reread))

    def read(self, key: str) -> bytes:
        return self._measured("read", lambda: self._storage.read(key))

    def stream(self, key: str) -> Iterator[bytes]:
        return self._storage.stream(key)

    @contextmanager
    def hold(self, key: str, digest: str) -> Iterator[Path]:
        held = self._storage.hold(key, digest)
        # Only its beginning: what the caller does with the file is no time of the store.
        path = self._measured("hold", held.__enter__)
        try:
            yield path
        except BaseException as error:
            if not held.__exit__(type(error), error, error.__traceback__):
                raise
        else:
            held.__exit__(None, None, None)

    def has(self, key: str) -> bool:
        return self._storage.has(key)

    def remove(self, keys: Iterable[str], *, durable: bool = False) -> None:
        self._measured("remove", lambda: self._storage.remove(keys, durable=durable))

    def remove_folder(self, folder: str) -> None:
        self._storage.remove_folder(folder)

    def folders(self, folder: str) -> list[str]:
        return self._storage.folders(folder)

    def keys(self, folder: str) -> Iterator[str]:
        return self._storage.keys(folder)

    def sweep(self, before: float) -> None:
        self._storage.sweep(before)


class _Chunks:
    """The chunks of a body, with the seconds that they were waited for and whether their source failed."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self.waited, self.failed = 0.0, False

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        began = time.perf_counter()
        try:
            return next(self._chunks)
        except StopIteration:
            raise
        except BaseException:
            self.failed = True
            raise
        finally:
            self.waited += time.perf_counter() - began
