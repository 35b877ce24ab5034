"""The uplink's part in a round of the root is a span of that round's trace, at a real OTLP receiver."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from pathlib import Path

import msgspec
import pytest

from archipel.client import Agent
from archipel.edge.site import EdgeSite
from archipel.edge.uplink import agent_config
from tests.support.edge_world import ComputedSite, open_edge_world
from tests.support.otlp import receiving


@pytest.mark.sampled(every=5)
def test_spans_of_the_uplink_go_where_the_server_s_go(tmp_path: Path) -> None:
    with receiving() as spans, open_edge_world(tmp_path) as world:
        given = world.edge._services
        settings = msgspec.structs.replace(given.settings, otlp_address=spans.address)
        services = dataclasses.replace(given, settings=settings)
        config = agent_config(services, world.upstream)
        for number in (1, 2):
            world.device(number)
        world.site("b", ComputedSite([3, 4, 5]))
        world.site("c", ComputedSite([6, 7]))
        edge = Agent(config, examples=dict, site=EdgeSite(services, world.upstream))
        edge.enrol(world.token("root", "hospitals", "aggregator"))
        world.agents.append(edge)
        task = world.task(min_cohort=3)
        with world.running():
            world.until(lambda: world.operator.tasks.get(task.task_id).state != "running")
            world.until(lambda: spans.named("device round", "archipel-device"))
        [above] = [each for each in world.rounds(task) if each.phase == "committed"]
        # By hand: the first 16 bytes of a hash of the root's round.
        trace = hashlib.sha256(b"archipel/v1/round-trace" + bytes.fromhex(above.round_id)).digest()[:16]
        [whole] = [span for span in spans.named("device round", "archipel-device") if span.trace_id == trace]
        deadline = time.monotonic() + 10
        steps: set[str] = set()
        while not {"masked", "uploaded"} <= steps:
            assert time.monotonic() < deadline, steps
            steps = {span.name for _, span in spans.received if span.parent_span_id == whole.span_id}
            time.sleep(0.1)
        # No device of the edge sends any.
        assert {span.trace_id for name, span in spans.received if name == "archipel-device"} == {trace}
