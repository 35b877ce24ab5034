"""The worlds of the server's tests on PostgreSQL instead of SQLite."""

from __future__ import annotations

from tests.support.fixtures.postgresql import cluster, database_url, template, world  # noqa: F401
