"""Faults that are one device's own: noted once, not held against the task; too many of them set the device aside."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from archipel.protocol import messages
from archipel.protocol.sealed import Sealed, decode, seal
from archipel.protocol.secagg import KeyTree
from archipel.server.devices.faults import note_fault
from tests.attacks.faults_world import noise_from, play_round
from tests.support.devices import Device
from tests.support.world import World

DAY = 86400.0


def note(world: World, device: Device, round_id: str, reason: str = "wrong") -> bool:
    with world.services.database.write() as session:
        return note_fault(session, device_id=device.id, round_id=round_id, reason=reason, now=world.clock.now)


def lose_a_round(world: World, devices: list[Device], *faulty: Device) -> str:
    """A round in which nobody answers, and these devices do something wrong."""
    world.start_round(devices)
    round_id = str(devices[0].plan.round_id)
    for device in faulty:
        note(world, device, round_id)
    world.clock.now += 121
    world.settle()
    for device in devices:
        device.open_session()
    return round_id


def shown(world: World, device: Device) -> dict[str, Any]:
    return world.operator("GET", f"/v1/devices/{device.id}")[1]


def audited(world: World, action: str) -> list[dict[str, Any]]:
    return [entry for entry in world.operator("GET", "/v1/audit")[1]["items"] if entry["action"] == action]


@pytest.mark.sampled(every=4)
def test_a_fault_is_noted_once_and_the_round_does_not_count(world: World) -> None:
    task = world.create_task(cohort=3)
    devices = world.add_devices(3)
    round_id = lose_a_round(world, devices, devices[0])
    assert not note(world, devices[0], round_id)  # sent again, aggregated again
    assert note(world, devices[0], round_id, "something else")
    assert shown(world, devices[0])["faults"] == 2
    assert [entry["detail"]["reason"] for entry in audited(world, "device.fault")] == ["wrong", "something else"]
    after = world.task(task["task_id"])
    assert (after["failed_rounds"], after["spoiled_rounds"]) == (0, 0)
    (found,) = world.rounds(task["task_id"])
    assert found["faults"] == [
        {"device_id": devices[0].id, "reason": "something else"},
        {"device_id": devices[0].id, "reason": "wrong"},
    ]
    # One that fails by itself does.
    lose_a_round(world, devices)
    assert world.task(task["task_id"])["failed_rounds"] == 1


@pytest.mark.sampled(every=6)
def test_too_many_set_the_device_aside_each_time_for_longer(world: World) -> None:
    world.create_task(cohort=3, rounds=9)
    devices = world.add_devices(4)
    bad, others = devices[0], devices[1:]
    bad.check_in()
    for times in (1, 2):
        for lost in range(1, 4):
            last = lose_a_round(world, [bad, *others[:2]], bad)
            assert (shown(world, bad)["quarantine"] is None) == (lost < 3)
        aside = shown(world, bad)["quarantine"]
        assert aside == {
            "reason": "wrong", "detail": "3 faults: 3 x wrong", "round_id": last, "times": times,
            "since": world.clock.now, "until": world.clock.now + times * DAY,
        }  # fmt: skip
        assert world.operator("GET", "/v1/devices?state=set-aside")[1]["items"][0]["device_id"] == bad.id
        assert world.operator("GET", "/v1/populations/pupils")[1]["set_aside"] == 1
        task = world.operator("GET", "/v1/tasks")[1]["items"][0]
        assert "1 device of the population set aside; 3 needed" in task["waiting_for"]
        # It waits, and no round takes it: the fourth device comes in its place.
        assert bad.check_in() is None
        world.start_round(others)
        assert bad.check_in() is None
        world.clock.now = aside["until"]
        world.settle()
        for device in devices:
            device.open_session()
        assert shown(world, bad)["quarantine"] is None
    for times, entry in enumerate(audited(world, "device.quarantine"), 1):
        assert entry["detail"]["until"] == pytest.approx(entry["time"] / 1e6 + times * DAY)


@pytest.mark.sampled(every=4)
def test_faults_of_long_ago_are_forgotten(world: World) -> None:
    world.create_task(cohort=3, rounds=9)
    devices = world.add_devices(3)
    for device in devices:
        device.check_in()
    for _ in range(2):
        lose_a_round(world, devices, devices[0])
    world.clock.now += 7 * DAY
    for device in devices:
        device.open_session()
    lose_a_round(world, devices, devices[0])
    assert (shown(world, devices[0])["quarantine"], shown(world, devices[0])["faults"]) == (None, 3)


@pytest.mark.sampled(every=4)
def test_an_operator_releases_it_and_what_was_counted_is_forgotten(world: World) -> None:
    world.create_task(cohort=3, rounds=9)
    devices = world.add_devices(3)
    for _ in range(3):
        lose_a_round(world, devices, devices[0])
    assert shown(world, devices[0])["quarantine"] is not None
    auditor = world.operator("POST", "/v1/tokens", {"name": "x", "role": "auditor"})[1]["token"]
    path = f"/v1/devices/{devices[0].id}/release"
    assert world.operator("POST", path, headers={"Authorization": f"Bearer {auditor}"})[0] == 403
    for _ in range(2):  # a second time it changes nothing
        status, answer = world.operator("POST", path)
        assert (status, answer["quarantine"]) == (200, None)
    assert len(audited(world, "device.release")) == 1
    lose_a_round(world, devices, devices[0])
    assert shown(world, devices[0])["quarantine"] is None


@pytest.mark.sampled(every=4)
def test_the_device_is_told(world: World) -> None:
    world.create_task(cohort=3, rounds=9)
    devices = world.add_devices(3)
    for _ in range(3):
        lose_a_round(world, devices, devices[0])
    request = messages.CheckIn(attributes={}, versions=None)
    for device in devices:
        answer = device.ask("POST", "/v1/check-ins", messages.CheckInResponse, request)
        told = answer.set_aside
        if device is devices[0]:
            assert told == messages.SetAside(until=world.clock.now + DAY, reason="wrong (3 faults: 3 x wrong)")
        else:
            assert told is None


def test_a_signed_advertisement_with_forbidden_keys_is_the_devices_own_doing(world: World) -> None:
    world.create_task(cohort=3)
    devices = world.add_devices(3)
    world.start_round(devices)
    good = devices[0].participant.advertise()
    body = decode("advertisement", good.advertisement.body, messages.Advertisement)

    def send(advertisement: Sealed, envelope_keys: bytes = good.envelope_keys) -> int:
        request = messages.AdvertiseRequest(advertisement=advertisement, envelope_keys=envelope_keys)
        return devices[0].call("PUT", f"{devices[0].round}/advertisement", request)[0]

    twice = msgspec.structs.replace(body, mask_key=body.cipher_key)
    # Whoever is between the device and the server can change bytes, or send old ones again: that is no fault.
    garbled = seal("advertisement", twice, devices[1].key)
    old = seal("advertisement", msgspec.structs.replace(body, plan="0" * 64), devices[0].key)
    assert [send(garbled), send(old)] == [422, 422]
    for keys in (bytes(len(good.envelope_keys)), good.envelope_keys[32:]):  # not those under the root that it signed
        assert send(good.advertisement, keys) == 422
    assert shown(world, devices[0])["faults"] == 0
    # It signed this one itself.
    assert [send(seal("advertisement", twice, devices[0].key)) for _ in range(2)] == [422, 422]
    assert shown(world, devices[0])["faults"] == 1
    assert send(good.advertisement) == 200
    # And so is a key of small order for an envelope, under the root that it signed.
    other = devices[1].participant.advertise()
    small = bytes(32) + other.envelope_keys[32:]
    root = KeyTree(small, devices[1].plan.max_cohort).root
    body = decode("advertisement", other.advertisement.body, messages.Advertisement)
    sealed = seal("advertisement", msgspec.structs.replace(body, envelope_root=root), devices[1].key)
    request = messages.AdvertiseRequest(advertisement=sealed, envelope_keys=small)
    assert devices[1].call("PUT", f"{devices[1].round}/advertisement", request)[0] == 422
    assert shown(world, devices[1])["faults"] == 1


@pytest.mark.sampled(every=4)
def test_a_search_ends_when_nothing_was_spoiled_for_long(world: World) -> None:
    world.create_task(cohort=3, rounds=9)
    devices = world.add_devices(3)
    play_round(world, devices, noise_from(devices[0]))
    population = "/v1/populations/pupils"
    assert world.operator("GET", population)[1]["search"]["suspects"] == 3
    world.clock.now += 7 * DAY - 1
    world.settle()
    assert world.operator("GET", population)[1]["search"] is not None
    world.clock.now += 61
    world.settle()
    assert world.operator("GET", population)[1]["search"] is None
    assert all(shown(world, device)["suspicion"] is None for device in devices)
