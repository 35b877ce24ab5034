"""What a PostgreSQL cluster is told as its administrator."""

from __future__ import annotations

from sqlalchemy import create_engine, text

from tests.support.cluster import Cluster


def administer(cluster: Cluster, statement: str) -> None:
    engine = create_engine(cluster.url("postgres").replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(statement))
    engine.dispose()
