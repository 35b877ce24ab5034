"""Devices and operators behind a proxy that cuts silent connections off: they go on, and nobody is told of an error."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from archipel.client import AgentConfig
from archipel.client.connection.transport import Transport
from archipel.operator import OperatorClient
from archipel.protocol.operator.tasks import Health
from tests.client.connection.test_waiting import at_work, held, until
from tests.support.faults import Proxy, running
from tests.support.federation import Federation, open_federation
from tests.support.idle_proxy import cutting

IDLE = 1.6
"""Seconds of silence after which the proxy cuts a connection off; nginx does after 60."""


def names(federation: Federation) -> set[str]:
    return {event.name for event in federation.events}


@pytest.mark.sampled(every=4)
def test_devices_that_wait_are_cut_off_once_and_then_in_time(tmp_path: Path, server_host: str) -> None:
    settings = {"retry_after": 0.5, "check_in_window": 30.0, "hold_seconds": 8.0}
    with open_federation(tmp_path, server_host, **settings) as made, cutting(made.server.port, IDLE) as proxy:
        agents = [made.agent(number, server=proxy.url) for number in range(3)]
        made.publish()
        with at_work(*agents):
            until(lambda: len(proxy.cuts) >= 3 and held(made) == 3)
            cuts = len(proxy.cuts)
            time.sleep(2.5 * IDLE)
            # All of them ask for less by now: the server answers before the proxy is impatient.
            assert len(proxy.cuts) == cuts
            task = made.task(cohort=3, rounds=2)
            ended = made.wait(task)
        assert (ended.state, ended.rounds_committed, ended.failed_rounds) == ("completed", 2, 0)
        assert "refused" not in names(made)
        assert "unreachable" not in names(made)
        assert {agent.device_id for agent in agents} == set(made.rounds(task)[-1].survivors)


@pytest.mark.sampled(every=3)
def test_connections_that_were_kept_are_cut_off_in_between(federation: Federation, tmp_path: Path) -> None:
    """Devices and operators keep theirs, as servers do, and ask again over a new one without a second try."""
    outages: list[object] = []
    with running(Proxy(federation.server.port)) as keeping, cutting(keeping.server_port, 0.3) as proxy:
        transport = Transport(proxy.url, AgentConfig(folder=tmp_path / "device", attempts=1, allow_http=True))
        with OperatorClient(proxy.url, federation.operator_token, on_outage=outages.append) as operator:
            for number in range(3):
                transport.call("GET", "/v1/health", Health)
                list(operator.tasks.list())
                until(lambda number=number: len(proxy.cuts) == 2 * number + 2, 5.0)  # type: ignore[misc]
        transport.close()
    assert (proxy.opened, outages) == (6, [])
