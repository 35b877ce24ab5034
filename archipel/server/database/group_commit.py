"""Group commit: what many threads want to write at one moment becomes one transaction, with one sync of the disk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar, cast

from sqlalchemy import Connection

from archipel.errors import RefusalError, ServerError

T = TypeVar("T")
V = TypeVar("V")

Work = Callable[[Connection, Sequence[V]], Sequence[T | RefusalError]]
"""Does something for each of some values, and returns an outcome for each: a result, or the error of one for which it
has changed nothing. It may be run twice, after its transaction was rolled back."""


class _Job(Generic[V, T]):
    """A value for which one thread wants work done, and its outcome."""

    def __init__(self, work: Work[V, T], value: V) -> None:
        self.work, self.value = work, value
        self.done = False
        self.error: Exception | None = None
        self._result: T | None = None

    def end(self, outcome: T | RefusalError) -> None:
        self.error = outcome if isinstance(outcome, RefusalError) else None
        self._result = None if isinstance(outcome, RefusalError) else outcome

    def outcome(self) -> T:
        if self.error is not None:
            raise self.error
        if not self.done:  # the thread that ran it with its own job was ended by a BaseException
            raise ServerError("the transaction was not committed")
        return cast(T, self._result)


class GroupCommit:
    """The queue of one kind of transactions, which `begin` opens, and commits at its end."""

    def __init__(self, begin: Callable[[], AbstractContextManager[Connection]]) -> None:
        self._begin = begin
        self._committing, self._queue_lock = threading.Lock(), threading.Lock()
        self._queue: list[_Job[Any, Any]] = []

    def run(self, work: Work[V, T], value: V) -> T:
        """The outcome of `work` for `value`, durable when this returns.

        All values that wait for the same `work` are given to it at once. Raises the value's RefusalError, and what the
        database or `work` raises.
        """
        # Each thread queues its job. The first one to get `_committing` runs all queued jobs; the others find theirs
        # done when they get it. While a commit waits for the disk, the next group gathers.
        job: _Job[V, T] = _Job(work, value)
        with self._queue_lock:
            self._queue.append(job)
        with self._committing:
            if not job.done:
                with self._queue_lock:
                    jobs, self._queue = self._queue, []
                self._commit(jobs)
        return job.outcome()

    def _commit(self, jobs: list[_Job[Any, Any]]) -> None:
        try:
            with self._begin() as connection:
                for work in dict.fromkeys(job.work for job in jobs):
                    alike = [job for job in jobs if job.work == work]
                    outcomes = work(connection, [job.value for job in alike])
                    for job, outcome in zip(alike, outcomes, strict=True):
                        job.end(outcome)
        except Exception as error:  # noqa: BLE001 - raised again, by the thread whose job it was
            # One job failed, and the transaction of all was rolled back. Each is run again by itself, so that only the
            # one that fails has the error.
            if len(jobs) > 1:
                for job in jobs:
                    self._commit([job])
                return
            jobs[0].error = error
        for job in jobs:
            job.done = True


def one_by_one(connection: Connection, works: Sequence[Callable[[Connection], T]]) -> list[T | RefusalError]:
    """Run different works of one transaction, one after the other."""
    outcomes: list[T | RefusalError] = []
    for work in works:
        try:
            outcomes.append(work(connection))
        except RefusalError as error:  # it has changed nothing, so the other works of the transaction go on
            outcomes.append(error)
    return outcomes
