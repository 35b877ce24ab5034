"""What the server's tests ask with a folder, asked with an object store: the same tests, with this folder's `world`."""

from __future__ import annotations

import pytest

from tests.server.http.test_bundles_and_tasks import *  # noqa: F403
from tests.server.processes.coordinator.test_coordinator import *  # noqa: F403
from tests.server.rounds.test_messages_of_a_round import *  # noqa: F403
from tests.server.rounds.test_secure_round import *  # noqa: F403

pytestmark = pytest.mark.sampled(every=6)
