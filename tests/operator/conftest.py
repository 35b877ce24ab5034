"""A server over TCP without a coordinator, and what the client sends."""

from __future__ import annotations

from tests.support.fixtures.served import sent, served  # noqa: F401
