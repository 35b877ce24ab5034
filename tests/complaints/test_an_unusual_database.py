"""'A TypeError in the depths of a library, because of how the database was made.'"""

from __future__ import annotations

import pytest

from archipel.errors import ServerError
from archipel.server.database.engine import Database
from tests.support.cluster import Cluster
from tests.support.postgresql import administer


@pytest.mark.sampled(every=4)
def test_sql_ascii_is_refused_and_the_remedy_told(cluster: Cluster) -> None:
    administer(cluster, "CREATE DATABASE ascii ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0")
    database = Database(cluster.url("ascii"))
    try:
        for asked in (database.migrate, database.check):
            with pytest.raises(ServerError, match=r"its encoding is SQL_ASCII.*ENCODING 'UTF8' TEMPLATE template0"):
                asked()
    finally:
        database.dispose()
        administer(cluster, "DROP DATABASE ascii WITH (FORCE)")


@pytest.mark.sampled(every=3)
def test_text_of_any_language_comes_back_from_another_encoding(cluster: Cluster) -> None:
    """LATIN1 is no UTF-8, and what it can hold it gives back."""
    administer(cluster, "CREATE DATABASE latin ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0")
    database = Database(cluster.url("latin"))
    try:
        database.migrate()
        with database.write() as session:
            found = session.connection().exec_driver_sql("SELECT 'Zürich'").scalar()
        assert found == "Zürich"
    finally:
        database.dispose()
        administer(cluster, "DROP DATABASE latin WITH (FORCE)")
