"""Servers as processes, with their rows in PostgreSQL."""

from __future__ import annotations

from tests.support.fixtures.postgresql import cluster, database_url, template, world  # noqa: F401
