"""What every request asks of the database goes by whole keys: a round of 10,000 takes it no longer than one of 10."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Select, select

from archipel.server.database.engine import Database
from archipel.server.database.tables import Answer
from archipel.server.http import auth
from archipel.server.http.api import check_ins, rounds
from archipel.server.rounds import reach, seats

QUERIES = {
    "session": auth._SESSION,
    "access token": auth._TOKEN,
    "seat": seats._SEAT,
    "seats": seats._LOCKED_SEATS,
    "status": rounds._STATUS,
    "check-in": check_ins._CHECK_IN,
    "answers given": select(Answer.phase).where(Answer.of("0" * 32, "1" * 32)),
}


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    made = Database(f"sqlite:///{tmp_path_factory.mktemp('plans')}/x.db")
    made.migrate()
    yield made
    made.dispose()


@pytest.mark.parametrize("name", QUERIES)
def test_nothing_is_looked_through(database: Database, name: str) -> None:
    query: Select[tuple[object]] = QUERIES[name]
    if name == "seats":  # of a list of devices, whose number is known only with its values
        query = query.params(seat_round="0" * 32, seat_devices=["1" * 32, "2" * 32])
    text = str(query.compile(database.engine, compile_kwargs={"render_postcompile": name == "seats"}))
    with database.engine.connect() as connection:
        rows = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}", ("x",) * text.count("?"))
        plan = [row.detail for row in rows]
        for step in plan:
            # One row, by a unique index: its columns are all of the key.
            assert step.startswith("SEARCH "), plan
            index = step.split(" INDEX ")[1].split(" ")[0]
            columns = list(connection.exec_driver_sql(f"PRAGMA index_info({index})"))
            assert step.count("=?") == len(columns), step


def test_what_reaches_a_device_is_found_by_its_digest_and_population(database: Database) -> None:
    """Few rows: one for each task and model of the population that names the very file."""
    text = str(reach.OF_DEVICE.compile(database.engine))
    with database.engine.connect() as connection:
        rows = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}", ("x",) * text.count("?"))
        plan = [row.detail for row in rows]
    assert all(step.startswith("SEARCH ") for step in plan), plan
    assert any("reaches" in step and "digest=? AND population=?" in step for step in plan), plan
