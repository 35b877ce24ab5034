"""As test_on_postgresql.py: what retention deletes, and what happens at the same moment."""

from __future__ import annotations

from tests.server.retention.test_races import *  # noqa: F403
from tests.server.retention.test_rules import (  # noqa: F401
    server_settings as of_rules,
)
