"""Devices check in, are assigned, replace their keys and are revoked, all at the same moment."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest
from sqlalchemy import text

from archipel.bundle import generate_key
from archipel.protocol import identity, messages
from archipel.protocol.sealed import Sealed, unseal
from archipel.server.database.tables import CheckInRow
from archipel.server.database.tables import Device as DeviceRow
from archipel.server.devices.revocation import revoke
from tests.support.devices import Device
from tests.support.world import World


@pytest.mark.sampled(every=4)
def test_nothing_fails_or_blocks_and_nobody_who_was_revoked_is_taken(world: World) -> None:
    tasks = [world.create_task(name=f"t{number}", min_cohort=3, cohort=3) for number in range(5)]
    devices = world.add_devices(24)
    gone, changing = devices[:8], devices[8:16]
    answers: Counter[tuple[str, int]] = Counter()
    errors: list[BaseException] = []
    stop = threading.Event()

    def in_thread(work: Callable[[], object]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - reported by the main thread
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def coordinate() -> None:
        while not stop.is_set():
            world.coordinator.step()

    def check_in(some: list[Device]) -> None:
        generator = random.Random(some[0].id)
        for _ in range(12):
            device = generator.choice(some)
            device.attributes = {"n": generator.random()}
            answers[
                "check-in", device.call("POST", "/v1/check-ins", messages.CheckIn(attributes=device.attributes))[0]
            ] += 1

    def revoke() -> None:
        for device in gone:
            answers["revoke", world.operator("POST", f"/v1/devices/{device.id}/revoke")[0]] += 1

    def rotate() -> None:
        for device in changing:
            new = generate_key()
            request = identity.rotation_request(device.chain, device.key, new, device.server_key)
            status, _ = device.call("PUT", f"/v1/devices/{device.id}/key", request)
            answers["rotate", status] += 1
            if status == 200:
                device.key, device.chain = new, identity.extend_chain(device.chain, request.certificate)

    coordinator = in_thread(coordinate)
    threads = [in_thread(lambda part=part: check_in(devices[part::4])) for part in range(4)]
    threads += [in_thread(revoke), in_thread(rotate)]
    for thread in threads:
        thread.join(60)
    stop.set()
    coordinator.join(60)
    assert errors == []
    assert not any(thread.is_alive() for thread in [*threads, coordinator])
    # A session ends with its device's key.
    allowed = {"check-in": {200, 401, 403}, "revoke": {200}, "rotate": {200, 409}}
    assert all(status in allowed[what] for what, status in answers), answers
    assert answers["revoke", 200] == len(gone)

    for task in tasks:
        world.operator("POST", f"/v1/tasks/{task['task_id']}/cancel")
    world.settle()
    last = world.create_task(name="last", cohort=24, threshold=15, min_cohort=15)
    rest = devices[8:]
    for device in rest:
        device.open_session()
        assert device.check_in() is None
    world.settle()
    world.clock.now += 61  # nobody else comes: the assigning deadline
    for device in rest:
        device.check_in()
    world.settle()
    [opened] = world.rounds(last["task_id"])
    taken = {each["device_id"] for each in opened["participants"]}
    assert taken == {device.id for device in rest}
    # The server knows each by the key that it has now.
    for device in rest:
        sealed = device.ask("POST", "/v1/check-ins", messages.CheckInResponse, messages.CheckIn()).plan
        assert isinstance(sealed, Sealed)
        unseal("plan", sealed, device.server_key, messages.RoundPlan)


@pytest.mark.sampled(every=3)
def test_a_check_in_that_waits_for_a_revocation_does_not_undo_it(world: World) -> None:
    """The check-in has looked its device up, and waits for the row that the revocation has not committed yet."""
    [device] = world.add_devices(1)
    device.check_in()
    world.clock.now += 30
    with world.services.database.write() as session:
        revoke(session, session.get_one(DeviceRow, device.id), world.clock.now)
        session.flush()
        thread = threading.Thread(target=device.check_in)
        thread.start()
        end = time.monotonic() + 30
        waiting = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
        while not world.services.database.look(waiting)[0]:  # type: ignore[index]
            assert time.monotonic() < end
    thread.join(30)
    assert not thread.is_alive()
    with world.services.database.read() as session:
        assert session.get_one(CheckInRow, device.id).due == 0.0
