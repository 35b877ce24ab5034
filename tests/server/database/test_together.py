"""Writes of one moment in one transaction: a failure is that of one, and no commit is told of that was none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection, event, insert, select
from sqlalchemy.exc import IntegrityError

from archipel.errors import ApiError, ServerError
from archipel.server.database.engine import Database
from archipel.server.database.tables import Blob
from archipel.server.http.problems import refuse

Work = Callable[[Connection], object]


class Group:
    """Runs works that all wait for the same moment, and keeps how each ended and how many transactions there were."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.commits = 0
        event.listen(database.engine, "commit", self._count)

    def _count(self, connection: object) -> None:
        self.commits += 1

    def run(self, *works: Work) -> list[object]:
        ends: list[object] = [None] * len(works)

        def one(place: int, work: Work) -> None:
            try:
                ends[place] = self.database.together(work)
            except BaseException as error:  # noqa: BLE001 - looked at by the test
                ends[place] = error

        threads = [threading.Thread(target=one, args=each) for each in enumerate(works)]
        assert self.database._group is not None
        with self.database._group._committing:
            for thread in threads:
                thread.start()
            end = time.monotonic() + 30
            while len(self.database._group._queue) < len(works):
                assert time.monotonic() < end
                time.sleep(0.001)
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        return ends

    def rows(self) -> set[str]:
        with self.database.read() as session:
            return set(session.scalars(select(Blob.digest)))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    database = Database(f"sqlite:///{tmp_path}/x.db")
    database.migrate()
    yield Group(database)
    database.dispose()


def store(name: str) -> Work:
    def work(connection: Connection) -> str:
        connection.execute(insert(Blob), [{"digest": name, "kind": "state", "size": 1, "created": 0.0}])
        return name

    return work


def refused(connection: Connection) -> None:
    raise refuse(409, "not now")


def torn_down(connection: Connection) -> None:
    raise SystemExit


@pytest.mark.sampled(every=3)
def test_many_writes_take_one_commit(group: Group) -> None:
    names = [f"{number:02}" for number in range(20)]
    assert group.run(*map(store, names)) == names
    assert group.rows() == set(names)
    assert group.commits == 2  # the other is that of reading them


def test_a_refusal_is_that_of_its_own_thread(group: Group) -> None:
    first, second, third = group.run(store("a"), refused, store("b"))
    assert (first, third) == ("a", "b")
    assert isinstance(second, ApiError)
    assert group.rows() == {"a", "b"}


def test_an_error_of_the_database_undoes_only_its_own_write(group: Group) -> None:
    ends = group.run(store("a"), store("b"), store("a"), store("c"))
    assert ends[1::2] == ["b", "c"]
    assert {type(ends[0]), type(ends[2])} == {str, IntegrityError}
    assert group.rows() == {"a", "b", "c"}


def test_what_was_not_committed_is_not_acknowledged(group: Group) -> None:
    """A thread may be torn down while it writes for others too."""
    ends = group.run(store("a"), torn_down, store("b"))
    assert group.rows() == set()
    assert all(isinstance(each, SystemExit | ServerError) for each in ends)
    assert group.run(store("a")) == ["a"]
