"""As test_on_postgresql.py: what says little about the database itself, a sample of it."""

from __future__ import annotations

import pytest

from tests.server.api.test_access import *  # noqa: F403
from tests.server.api.test_devices import *  # noqa: F403
from tests.server.api.test_enrolment_tokens import *  # noqa: F403
from tests.server.api.test_paging import *  # noqa: F403
from tests.server.api.test_permissions import *  # noqa: F403
from tests.server.api.test_rotations import *  # noqa: F403
from tests.server.coordinator.test_candidates import *  # noqa: F403
from tests.server.test_bundles_and_tasks import *  # noqa: F403
from tests.server.test_enrolment import *  # noqa: F403
from tests.server.test_messages_of_a_round import *  # noqa: F403

pytestmark = pytest.mark.sampled(every=16)
