"""One trace for each round, from the coordinator through the web requests to the agents, at a real OTLP receiver."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from archipel import tracing
from archipel.bundle import Bundle, PrivacyPolicy, generate_key
from archipel.server.app import create_app
from archipel.server.processes.coordinator import Coordinator
from archipel.server.services import Services
from tests.server.rounds.test_plain_rounds import update
from tests.support.fixtures.strategies import make  # noqa: F401
from tests.support.otlp import Spans, receiving
from tests.support.real_rounds import run_rounds
from tests.support.world import World

POLICY = PrivacyPolicy(modes=("secure",), min_cohort=3, threshold=0.6, max_clip=10.0, max_bits=24, colluders=0.0)
MINE = (0, 2)
"""The clients whose owners have spans sent."""


def until_sent(spans: Spans, name: str, count: int) -> None:
    deadline = time.monotonic() + 20
    while len(spans.named(name)) < count:
        assert time.monotonic() < deadline, [span.name for _, span in spans.received]
        time.sleep(0.1)


@pytest.mark.slow  # a federation of processes
def test_a_round_is_one_trace_and_two_rounds_have_nothing_in_common(
    make: Callable[..., Bundle],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = generate_key()
    bundle = make("fedavg", key=key, batch_size=32, privacy=POLICY, strategy_options={"clip": 5.0, "bits": 24})
    with receiving() as servers, receiving() as owners:
        monkeypatch.setenv("ARCHIPEL_SERVER_OTLP_ADDRESS", servers.address)
        # What a device's environment says of telemetry decides nothing.
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", servers.address)
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "host.name=ward-7")

        def agents(client: int) -> dict[str, Any]:
            return {"otlp_address": owners.address} if client in MINE else {}

        run_rounds(tmp_path, bundle, key, 2, agents=agents)
        until_sent(servers, "round", 2)
        deadline = time.monotonic() + 20
        while len(owners.named("device round", "archipel-device")) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    first, second = servers.named("round")
    assert {first.trace_id, second.trace_id} == {span.trace_id for _, span in servers.received}
    assert len({first.trace_id, second.trace_id, first.span_id, second.span_id}) == 4
    of_devices: list[set[bytes]] = []
    for root in (first, second):
        about = {each.key: each.value.string_value for each in root.attributes}
        assert about["archipel.outcome"] == "committed"
        # By hand: the first 16 and the next 8 bytes of a hash of the round's id.
        digest = hashlib.sha256(b"archipel/v1/round-trace" + bytes.fromhex(about["archipel.round_id"])).digest()
        assert (root.trace_id, root.span_id, root.parent_span_id) == (digest[:16], digest[16:24], b"")
        mine = [span for _, span in servers.received if span.trace_id == root.trace_id]
        phases = {span.name for span in mine if span.name.startswith("phase ")}
        assert {f"phase {name}" for name in ("advertising", "sharing", "masking", "unmasking", "aggregating")} <= phases
        for span in mine:
            if span.name.startswith("phase "):
                assert span.parent_span_id == root.span_id
                assert root.start_time_unix_nano - 10**9 <= span.start_time_unix_nano
                assert span.end_time_unix_nano <= root.end_time_unix_nano + 10**9
        uploads = [span for span in mine if span.name == "PUT /v1/rounds/{round_id}/update"]
        assert len(uploads) == 4
        devices = [span for span in owners.named("device round", "archipel-device") if span.trace_id == root.trace_id]
        assert len(devices) == 2
        assert {span.parent_span_id for span in devices} == {root.span_id}
        parts = [span for _, span in owners.received if span.trace_id == root.trace_id]
        assert {"trained", "masked", "uploaded"} <= {span.name for span in parts}
        ids = {span.span_id for span in devices}
        assert {span.parent_span_id for span in parts if span not in devices} <= ids
        # Requests of these two devices hang below the device's part, those of the others below the round.
        assert {span.parent_span_id for span in uploads} <= ids | {root.span_id}
        assert {span.parent_span_id for span in uploads} & ids
        assert root.span_id in {span.parent_span_id for span in uploads}
        of_devices.append(ids)
    assert not of_devices[0] & of_devices[1]
    assert {service for service, _ in servers.received} == {"archipel-server"}
    assert {service for service, _ in owners.received} == {"archipel-device"}
    assert not any(b"ward-7" in body for body in (*servers.bodies, *owners.bodies))


@pytest.mark.sampled(every=4)
def test_the_server_sends_its_part(world: World) -> None:
    with receiving() as spans:
        settings = msgspec.structs.replace(world.settings, otlp_address=spans.address)
        world.app.extensions["archipel"].database.dispose()
        world.app = create_app(settings, clock=world.clock)
        services = Services.open(settings, clock=world.clock)
        world.coordinator = Coordinator(services)
        task = world.create_task(privacy="plain", threshold=None, cohort=3, min_cohort=3)
        devices = world.add_devices(3)
        world.start_round(devices)
        world.clock.now += 7
        for index, device in enumerate(devices):
            device.updating(**update(index))
        world.settle()
        for tracer in (services.tracer, world.app.extensions["archipel"].tracer):
            assert tracer is not None
            tracer.close()
    [done] = world.rounds(task["task_id"])
    [root] = spans.named("round")
    ids = tracing.round_ids(done["round_id"])
    assert (root.trace_id.hex(), root.span_id.hex()) == (f"{ids.trace:032x}", f"{ids.span:016x}")
    assert root.end_time_unix_nano - root.start_time_unix_nano == 7 * 10**9
    [phase] = spans.named("phase updating")
    assert phase.end_time_unix_nano - phase.start_time_unix_nano == 7 * 10**9
    assert len(spans.named("PUT /v1/rounds/{round_id}/update")) == 3
    assert {span.trace_id for _, span in spans.received} == {root.trace_id}
    assert {span.parent_span_id for _, span in spans.received if span is not root} == {root.span_id}
    # No span tells which device it was.
    assert not any(device.id.encode() in body for device in devices for body in spans.bodies)


@pytest.mark.sampled(every=4)
def test_a_span_is_lost_where_nobody_receives_it_and_nothing_waits(caplog: pytest.LogCaptureFixture) -> None:
    tracer = tracing.Tracer("http://127.0.0.1:9", "archipel-server")
    began = time.monotonic()
    tracer.record("round", 1.0, 2.0, parent=None, own=tracing.round_ids("a" * 32))
    assert time.monotonic() - began < 0.5
    tracer.close()
