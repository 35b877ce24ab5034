"""A real server over HTTP on loopback, its operator, and agents with a small model and data of their own."""

from __future__ import annotations

from tests.support.fixtures.federation import bundle_maker, federation, outcome_of, server_host  # noqa: F401
