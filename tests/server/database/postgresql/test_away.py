"""While PostgreSQL is stopped, and after it is there again."""

from __future__ import annotations

import logging

import msgspec
import pytest

from archipel.protocol.messages import Problem
from tests.support.cluster import Cluster
from tests.support.world import World


@pytest.mark.sampled(every=4)
def test_a_database_that_is_away_is_said_in_one_line(
    world: World, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    (device,) = world.add_devices(1)
    caplog.set_level(logging.INFO, "archipel.server")
    cluster.halt()
    try:
        # The connections that were open break first, then none can be made.
        for _ in range(12):
            status, answer = device.call("POST", "/v1/check-ins", b"{}")
            found = msgspec.convert(answer, Problem)
            assert (status, found.status) == (503, 503), found
            assert found.detail == "the database is not reachable; try again"
            assert world.operator("GET", "/v1/tasks")[0] == 503
    finally:
        cluster.start_again()
    records = [record for record in caplog.records if record.name == "archipel.server"]
    assert len(records) == 24
    assert not any(record.exc_info or "\n" in record.getMessage() for record in records)
    assert "No such file or directory" in records[-1].getMessage()
    assert device.check_in() is None
