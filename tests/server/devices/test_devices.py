"""Devices as operators see them, and what is left of one that was revoked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from archipel.bundle import generate_key, read_weights
from archipel.protocol import identity, messages
from archipel.server.app import create_app
from tests.server.rounds.test_buffered_rounds import asynchronous, seats
from tests.server.rounds.test_plain_rounds import mean, parameters, same, update
from tests.support.devices import Device
from tests.support.world import World

PHASES = ("advertising", "sharing", "complaining", "masking", "confirming", "unmasking")


def shown(world: World, device: Device) -> dict[str, Any]:
    status, answer = world.operator("GET", f"/v1/devices/{device.id}")
    assert status == 200, answer
    return answer


def revoke(world: World, device: Device) -> dict[str, Any]:
    status, answer = world.operator("POST", f"/v1/devices/{device.id}/revoke")
    assert status == 200, answer
    return answer


def limited(world: World, *populations: str, role: str = "operator") -> dict[str, str]:
    made = world.operator("POST", "/v1/tokens", {"name": "x", "role": role, "populations": list(populations)})[1]
    return {"Authorization": f"Bearer {made['token']}"}


@pytest.mark.sampled(every=4)
def test_what_is_shown_and_what_is_not(world: World) -> None:
    (device,) = world.add_devices(1)
    known = {
        "device_id": device.id, "population": "pupils", "kind": "device", "state": "active",
        "enrolled": world.clock.now, "last_seen": None, "revoked": None, "rotations": 0, "rounds": 0,
        "faults": 0, "quarantine": None, "suspicion": None,
    }  # fmt: skip
    assert shown(world, device) == known
    world.clock.now += 7
    device.attributes = {"serial": "A-77"}
    device.check_in()
    assert shown(world, device) == {**known, "last_seen": world.clock.now}
    assert world.operator("GET", f"/v1/devices/{'0' * 32}")[0] == 404


@pytest.mark.sampled(every=4)
def test_pages_by_population_and_state(world: World) -> None:
    devices = []
    for number in range(7):
        world.clock.now += number % 3
        devices += world.add_devices(1)
    gone = {devices[number].id for number in (1, 4)}
    for device in devices:
        if device.id in gone:
            revoke(world, device)

    def walk(query: str, limit: int) -> list[str]:
        found, after = [], ""
        while True:
            status, page = world.operator("GET", f"/v1/devices?limit={limit}{query}{after}")
            assert status == 200, page
            found += page["items"]
            if page["next"] is None:
                times = [each["enrolled"] for each in found]
                assert times == sorted(times, reverse=True)
                return [each["device_id"] for each in found]
            after = f"&after={page['next']}"

    everybody = {device.id for device in devices}
    for limit in (1, 2, 500):
        for query, expected in (
            ("", everybody), ("&state=revoked", gone), ("&state=active", everybody - gone),
            ("&population=pupils", everybody), ("&population=staff", set()),
        ):  # fmt: skip
            found = walk(query, limit)
            assert len(found) == len(set(found))
            assert set(found) == expected
    # The one that the first page ended with is not in that state any more when the next page is asked for.
    first = world.operator("GET", "/v1/devices?limit=2&state=active")[1]
    active = walk("&state=active", 500)
    world.operator("POST", f"/v1/devices/{first['next']}/revoke")
    second = world.operator("GET", f"/v1/devices?limit=2&state=active&after={first['next']}")[1]
    assert [each["device_id"] for each in first["items"] + second["items"]] == active[:4]


@pytest.mark.sampled(every=3)
def test_an_operator_sees_and_revokes_devices_of_its_populations_only(world: World) -> None:
    (device,) = world.add_devices(1)
    other = limited(world, "staff")
    mine = limited(world, "staff", "pupils")
    for method, path in (("GET", ""), ("POST", "/revoke")):
        status, answer = world.operator(method, f"/v1/devices/{device.id}{path}", headers=other)
        assert (status, answer["detail"]) == (404, f"no device {device.id}")
    assert world.operator("GET", "/v1/devices", headers=other)[1]["items"] == []
    assert world.operator("GET", "/v1/devices?population=pupils", headers=other)[0] == 403
    assert world.operator("GET", f"/v1/devices?after={device.id}", headers=other)[0] == 404
    assert len(world.operator("GET", "/v1/devices?population=pupils", headers=mine)[1]["items"]) == 1
    assert world.operator("POST", f"/v1/devices/{device.id}/revoke", headers=mine)[0] == 200


def test_a_revoked_device_can_do_nothing_any_more(world: World) -> None:
    (device,) = world.add_devices(1)
    nonce = device.challenge().nonce
    request = device.session_request(nonce)
    device.check_in()  # its session is in the cache now
    first = revoke(world, device)
    assert (first["state"], first["revoked"]) == ("revoked", world.clock.now)
    assert device.call("POST", "/v1/check-ins", messages.CheckIn())[0] == 401
    device.token = ""
    for path, body in (
        ("/v1/challenges", messages.ChallengeRequest(device_id=device.id)),
        ("/v1/sessions", request),
    ):
        status, answer = device.call("POST", path, body)
        assert status == 403, answer
        assert "was revoked" in answer["detail"]
    with world.services.database.engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM sessions").scalar() == 0
    # Its token has done its service, also for another key.
    again = identity.enrolment_request(device.enrolment_token, device.key)
    assert device.call("POST", "/v1/devices", again)[0] == 403
    device.key = generate_key()
    again = identity.enrolment_request(device.enrolment_token, device.key)
    assert device.call("POST", "/v1/devices", again)[0] == 403
    # Once more changes nothing, and is not noted.
    world.clock.now += 60
    assert revoke(world, device) == first
    noted = [each for each in world.operator("GET", "/v1/audit")[1]["items"] if each["action"] == "device.revoke"]
    assert [(each["actor"], each["subject"], each["detail"]) for each in noted] == [
        ("admin:root", device.id, {"population": "pupils"})
    ]


def test_what_it_told_about_itself_is_deleted(world: World) -> None:
    (device,) = world.add_devices(1)
    device.attributes = {"serial": "A-77"}
    device.check_in()
    revoke(world, device)
    with world.services.database.engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT attributes FROM check_ins").scalar_one() in ("{}", {})


@pytest.mark.sampled(every=3)
def test_another_web_process_believes_its_session_for_five_seconds_and_stores_nothing(world: World) -> None:
    world.create_task(cohort=3)
    devices = world.add_devices(3)
    other = create_app(world.settings, clock=world.clock)

    def elsewhere(method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        with other.test_client() as client, client.open(path, method=method, data=body, headers=headers) as response:
            return response.status_code, response.get_data()

    world.start_round(devices)
    device = devices[0]
    device.transport = elsewhere
    device.status()
    revoke(world, device)
    assert device.status().phase == "advertising"
    status, answer = device.call("PUT", f"{device.round}/advertisement", device.participant.advertise())
    assert status == 403, answer
    world.clock.now += 5
    assert device.call("GET", device.round)[0] == 401
    other.extensions["archipel"].database.dispose()


@pytest.mark.sampled(every=3)
def test_it_is_not_taken_into_a_round(world: World) -> None:
    world.create_task(cohort=4)
    devices = world.add_devices(4)
    for device in devices:
        device.check_in()
    revoke(world, devices[3])
    world.settle()
    world.clock.now += 61  # the assigning deadline: the three others are enough
    for device in devices[:3]:
        device.check_in()
    world.settle()
    assert [device.join() for device in devices[:3]] == [True] * 3
    assert shown(world, devices[3])["rounds"] == 0
    assert shown(world, devices[0])["rounds"] == 1


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.sampled(every=6)
def test_a_round_goes_on_without_it(world: World, phase: str) -> None:
    """What it had sent before counts, as that of a device that vanished at the same moment."""
    task = world.create_task(cohort=5)
    devices = world.add_devices(5)
    for number, device in enumerate(devices, start=1):
        device.vector = np.full(9, 256 * number, np.uint32)
        device.vector[8] = 4096  # a weight of 1
    world.start_round(devices)
    world.run_to(phase, devices)
    victim, rest = devices[2], [*devices[:2], *devices[3:]]
    revoke(world, victim)
    assert victim.call("GET", victim.round)[0] == 401
    for name in PHASES[PHASES.index(phase) :]:
        for device in rest:
            device.answer(name)
        world.settle()
        if rest[0].status().phase == name:
            world.clock.now += 121  # nobody waits longer than the deadline
            world.settle()
    [made] = world.rounds(task["task_id"])
    assert made["phase"] == "committed", made
    counted = phase in ("confirming", "unmasking")
    assert (victim.id in made["survivors"]) == counted
    weights = world.operator("GET", f"/v1/blobs/{made['weights_out']}")[1]
    numbers = [1, 2, 4, 5] + ([3] if counted else [])
    mean = np.float32(sum(numbers) / len(numbers))
    np.testing.assert_allclose(read_weights(weights)["w"], np.full((3, 2), mean), rtol=1e-6)


@pytest.mark.sampled(every=4)
def test_an_update_that_was_acknowledged_before_stays_in_the_sum(world: World) -> None:
    task = world.create_task(cohort=4)
    devices = world.add_devices(4)
    world.start_round(devices)
    world.run_to("masking", devices)
    devices[0].masking()
    revoke(world, devices[0])
    for device in devices[1:]:
        device.masking()
    world.settle()
    for phase in ("confirming", "unmasking"):
        for device in devices[1:]:
            device.answer(phase)
        world.settle()
        world.clock.now += 31
        world.settle()
    [made] = world.rounds(task["task_id"])
    assert made["phase"] == "committed"
    assert devices[0].id in made["survivors"]


@pytest.mark.sampled(every=3)
def test_in_a_plain_round_too(world: World) -> None:
    task = world.create_task(privacy="plain", threshold=None, goal=4)
    devices = world.add_devices(5)
    world.start_round(devices)
    devices[0].updating(**update(0))
    revoke(world, devices[0])
    revoke(world, devices[1])
    with pytest.raises(AssertionError, match="401"):
        devices[1].updating(**update(1))
    for number in (2, 3, 4):
        devices[number].updating(**update(number))
    world.settle()
    [made] = world.rounds(task["task_id"])
    assert made["phase"] == "committed"
    assert made["survivors"] == sorted(devices[number].id for number in (0, 2, 3, 4))
    same(parameters(world, task), mean([update(number) for number in (0, 2, 3, 4)]))


@pytest.mark.sampled(every=4)
def test_in_an_asynchronous_task_too(world: World) -> None:
    """Where a device keeps its seat although the round is over."""
    task = asynchronous(world, cohort=3, concurrency=4)
    devices = world.add_devices(4)
    assert seats(world, devices) == devices
    for number in (0, 1, 2):
        devices[number].updating(**update(number))
    world.clock.now += 1
    world.settle()
    assert world.task(task["task_id"])["rounds_committed"] == 1
    revoke(world, devices[3])
    with pytest.raises(AssertionError, match="401"):
        devices[3].updating(**update(3))
    assert seats(world, devices[:3]) == devices[:3]
    assert shown(world, devices[3])["rounds"] == 1


@pytest.mark.sampled(every=4)
def test_populations(world: World) -> None:
    world.create_task(cohort=3)
    paused = world.create_task(population="staff")
    world.operator("POST", f"/v1/tasks/{paused['task_id']}/pause")
    over = world.create_task(population="staff")
    world.operator("POST", f"/v1/tasks/{over['task_id']}/cancel")
    devices = world.add_devices(6)
    world.start_round(devices[:3])
    devices[3].check_in()
    revoke(world, devices[5])
    revoke(world, devices[0])  # in a round all the same
    quiet = {"live_tasks": 1, "set_aside": 0, "search": None}
    pupils = {"name": "pupils", "enrolled": 4, "revoked": 2, "waiting": 1, "in_rounds": 3, **quiet}
    staff = {"name": "staff", "enrolled": 0, "revoked": 0, "waiting": 0, "in_rounds": 0, **quiet}
    assert world.operator("GET", "/v1/populations")[1] == {"items": [pupils, staff], "next": None}
    first = world.operator("GET", "/v1/populations?limit=1")[1]
    assert first == {"items": [pupils], "next": "pupils"}
    assert world.operator("GET", "/v1/populations?limit=1&after=pupils")[1] == {"items": [staff], "next": None}
    assert world.operator("GET", "/v1/populations/staff")[1] == staff
    assert world.operator("GET", "/v1/populations/nobody")[0] == 404
    token = limited(world, "staff", role="auditor")
    assert world.operator("GET", "/v1/populations", headers=token)[1]["items"] == [staff]
    assert world.operator("GET", "/v1/populations/pupils", headers=token)[0] == 403
    world.clock.now += 13  # too late to be taken
    assert world.operator("GET", "/v1/populations/pupils")[1]["waiting"] == 0
