"""As test_on_postgresql.py: what retention deletes, and what happens at the same moment."""

from __future__ import annotations

from tests.server.retention.test_races import *  # noqa: F403
from tests.server.retention.test_rules import (  # noqa: F401
    server_settings,
    test_both_versions_of_a_rollout_stay_until_it_has_ended,
    test_what_is_promoted_and_what_a_rollback_goes_back_to_stays,
)
