"""What the server's tests ask on SQLite, asked on PostgreSQL: the same tests, with this folder's `world`.

All of them run on SQLite with every commit; here a third of them does, another one with the next commit.
"""

from __future__ import annotations

import pytest

from tests.server.http.test_task_control import *  # noqa: F403
from tests.server.processes.coordinator.test_coordinator import *  # noqa: F403
from tests.server.processes.coordinator.test_lease import *  # noqa: F403
from tests.server.rounds.test_answering import *  # noqa: F403
from tests.server.rounds.test_leaving import *  # noqa: F403
from tests.server.rounds.test_rounds import *  # noqa: F403
from tests.server.rounds.test_secure_round import *  # noqa: F403

pytestmark = pytest.mark.sampled(every=6)
