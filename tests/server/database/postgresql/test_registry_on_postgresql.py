"""As test_on_postgresql.py: models, versions, rollouts and offers, a sample of it."""

from __future__ import annotations

import pytest

from tests.server.registry.test_metrics import *  # noqa: F403
from tests.server.registry.test_offers import *  # noqa: F403
from tests.server.registry.test_rollout_kills import *  # noqa: F403
from tests.server.registry.test_rollouts import *  # noqa: F403
from tests.server.registry.test_stage_devices import *  # noqa: F403
from tests.server.registry.test_versions import *  # noqa: F403
from tests.support.fixtures.fleet import *  # noqa: F403

pytestmark = pytest.mark.sampled(every=16)
