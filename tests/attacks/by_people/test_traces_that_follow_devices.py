"""Whoever collects a server's traces wants to follow a device from round to round, or to write into others' traces."""

from __future__ import annotations

import msgspec
import pytest

from archipel import tracing
from archipel.server.app import create_app
from archipel.server.processes.coordinator import Coordinator
from archipel.server.services import Services
from tests.server.rounds.test_plain_rounds import update
from tests.support.fixtures.server import (  # noqa: F401
    bundle_file,
    bundle_maker,
    data_folder,
    device_maker,
    empty_database,
    keys,
    server_settings,
    world,
)
from tests.support.otlp import receiving
from tests.support.world import World


def test_a_sender_cannot_reach_the_trace_of_another_round() -> None:
    mine, other = "a" * 32, "b" * 32
    root = tracing.round_ids(mine)
    own = tracing.device_ids(mine)
    assert tracing.read_parent(tracing.write_parent(own), mine) == own
    for header in (
        None, "", tracing.write_parent(tracing.device_ids(other)), tracing.write_parent(own)[:-1],
        f"01{tracing.write_parent(own)[2:]}", f"00-{root.trace:032x}-{0:016x}-01", "x" * 10_000,
        tracing.write_parent(own) + "\n",
    ):  # fmt: skip
        assert tracing.read_parent(header, mine) == root
    assert own.trace == root.trace
    assert own.span != root.span


@pytest.mark.sampled(every=4)
def test_two_rounds_of_the_same_devices_share_nothing(world: World) -> None:  # noqa: F811
    """Neither ids of traces and spans, nor anything that names a device."""
    with receiving() as spans:
        settings = msgspec.structs.replace(world.settings, otlp_address=spans.address)
        world.app.extensions["archipel"].database.dispose()
        world.app = create_app(settings, clock=world.clock)
        services = Services.open(settings, clock=world.clock)
        world.coordinator = Coordinator(services)
        task = world.create_task(privacy="plain", threshold=None, cohort=3, min_cohort=3, rounds=2)
        devices = world.add_devices(3)
        for _ in range(2):
            world.start_round(devices)
            for index, device in enumerate(devices):
                device.updating(**update(index))
            world.settle()
            world.clock.now += 60
        for tracer in (services.tracer, world.app.extensions["archipel"].tracer):
            assert tracer is not None
            tracer.close()
    first, second = (tracing.round_ids(each["round_id"]).trace.to_bytes(16) for each in world.rounds(task["task_id"]))
    of = {trace: {span.span_id for _, span in spans.received if span.trace_id == trace} for trace in (first, second)}
    assert {span.trace_id for _, span in spans.received} == {first, second}
    assert min(map(len, of.values())) >= 4
    assert not of[first] & of[second]
    told = b"".join(spans.bodies)
    # So names of devices would be seen.
    assert all(each["round_id"].encode() in told for each in world.rounds(task["task_id"]))
    for device in devices:
        assert device.id.encode() not in told
        assert device.token.encode() not in told
