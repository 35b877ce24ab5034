"""As test_on_postgresql.py: what says little about the database itself, a sample of it."""

from __future__ import annotations

import pytest

from tests.server.devices.test_devices import *  # noqa: F403
from tests.server.devices.test_enrolment import *  # noqa: F403
from tests.server.devices.test_enrolment_tokens import *  # noqa: F403
from tests.server.devices.test_rests import *  # noqa: F403
from tests.server.devices.test_rotations import *  # noqa: F403
from tests.server.http.test_access import *  # noqa: F403
from tests.server.http.test_bundles_and_tasks import *  # noqa: F403
from tests.server.http.test_paging import *  # noqa: F403
from tests.server.http.test_permissions import *  # noqa: F403
from tests.server.rounds.test_candidates import *  # noqa: F403
from tests.server.rounds.test_durations import *  # noqa: F403
from tests.server.rounds.test_messages_of_a_round import *  # noqa: F403
from tests.server.rounds.test_robust_rounds import *  # noqa: F403
from tests.server.rounds.test_root_devices import *  # noqa: F403
from tests.server.rounds.test_secure_groups import *  # noqa: F403

pytestmark = pytest.mark.sampled(every=16)
