"""A server that a provider of identities is set for."""

from __future__ import annotations

from tests.support.fixtures.openid import provider, server_settings  # noqa: F401
