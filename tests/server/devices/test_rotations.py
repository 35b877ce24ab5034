"""A device replaces its key: from then on the server and its peers know it by the new one, and by no other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import select

from archipel.bundle import generate_key, read_weights
from archipel.protocol import identity, messages
from archipel.protocol.sealed import decode, public_bytes
from archipel.server.database.tables import Device as DeviceRow
from tests.support.devices import ANSWERED, Device
from tests.support.world import World


def request_for(device: Device, new: Ed25519PrivateKey) -> messages.RotationRequest:
    return identity.rotation_request(device.chain, device.key, new, device.server_key)


def send(device: Device, request: messages.RotationRequest) -> tuple[int, Any]:
    device.token = ""
    return device.call("PUT", f"/v1/devices/{device.id}/key", request)


def rotate(device: Device) -> messages.RotationRequest:
    """Replace the key, and use the new one from then on."""
    new = generate_key()
    request = request_for(device, new)
    status, answer = send(device, request)
    number = len(device.chain.rotations) + 1
    assert (status, answer) == (200, {"device_id": device.id, "rotations": number})
    device.chain, device.key = identity.extend_chain(device.chain, request.certificate), new
    return request


def audited(world: World) -> list[tuple[str, str, dict[str, int]]]:
    entries = world.operator("GET", "/v1/audit")[1]["items"]
    return [(each["actor"], each["subject"], each["detail"]) for each in entries if each["action"] == "device.rotate"]


def test_the_new_key_opens_sessions_and_the_old_one_does_not(world: World) -> None:
    (device,) = world.add_devices(1)
    old, token = device.key, device.token
    device.check_in()  # the session is in the cache
    nonce = device.challenge().nonce
    rotate(device)
    device.token = token
    assert device.call("POST", "/v1/check-ins", messages.CheckIn())[0] == 401
    device.open_session()
    assert device.check_in() is None
    new, device.key = device.key, old
    device.token = ""
    for challenge in (nonce, device.challenge().nonce):
        status, answer = device.call("POST", "/v1/sessions", device.session_request(challenge))
        assert status == 403, answer
    device.key = new
    shown = world.operator("GET", f"/v1/devices/{device.id}")[1]
    assert (shown["rotations"], shown["device_id"]) == (1, device.id)
    assert audited(world) == [(f"device:{device.id}", device.id, {"number": 1})]


def test_the_same_request_may_be_sent_again_and_an_older_one_changes_nothing(world: World) -> None:
    (device,) = world.add_devices(1)
    first = rotate(device)
    assert send(device, first) == (200, {"device_id": device.id, "rotations": 1})
    second = rotate(device)
    assert send(device, second)[0] == 200
    status, answer = send(device, first)
    assert status == 403, answer
    device.open_session()
    assert len(audited(world)) == 2
    with world.services.database.read() as session:
        kept = decode("chain", session.scalars(select(DeviceRow.chain)).one(), messages.Chain)
    assert kept == device.chain


def test_who_may_not(world: World) -> None:
    device, other = world.add_devices(2)
    new = generate_key()
    good = request_for(device, new)
    foreign = identity.rotation_request(device.chain, device.key, new, public_bytes(generate_key()))
    thief = identity.rotation_request(device.chain, generate_key(), new, device.server_key)
    unproved = messages.RotationRequest(certificate=good.certificate, proof=thief.certificate)
    for request in (foreign, thief, unproved):
        status, answer = send(device, request)
        assert status == 403, answer
    assert other.call("PUT", f"/v1/devices/{other.id}/key", good)[0] == 403
    assert other.call("PUT", f"/v1/devices/{'0' * 32}/key", good)[0] == 404
    world.operator("POST", f"/v1/devices/{device.id}/revoke")
    status, answer = send(device, good)
    assert status == 403
    assert "was revoked" in answer["detail"]


def test_another_key_after_the_key_was_replaced(world: World) -> None:
    """By whoever still has the old one."""
    (device,) = world.add_devices(1)
    late = request_for(device, generate_key())
    rotate(device)
    status, answer = send(device, late)
    assert (status, answer["detail"]) == (403, "the key was replaced already, by another one")


def test_no_key_is_anybodys_twice(world: World, device_maker: type[Device]) -> None:
    device, other = world.add_devices(2)
    status, answer = send(device, request_for(device, other.key))
    assert status == 409, answer
    old = device.key
    rotate(device)
    assert send(device, request_for(device, old))[0] == 403
    assert send(other, request_for(other, old))[0] == 409
    # Nor does a new device come with one, the first or a later one of another.
    for key in (old, device.key):
        newcomer = device_maker(world.transport, world.keys, world.settings.public_key)
        newcomer.key = key
        status, answer = newcomer.call(
            "POST", "/v1/devices", identity.enrolment_request(newcomer.enrolment_token, newcomer.key)
        )
        assert status == 409, answer


def test_a_device_that_has_replaced_its_key_does_not_enrol_again(world: World) -> None:
    (device,) = world.add_devices(1)
    again = identity.enrolment_request(device.enrolment_token, device.key)
    rotate(device)
    assert device.call("POST", "/v1/devices", again)[0] == 409
    with_chain = messages.EnrolmentRequest(
        chain=device.chain, proof=identity.enrolment_request(device.enrolment_token, device.key).proof
    )
    assert device.call("POST", "/v1/devices", with_chain)[0] == 403


@pytest.mark.parametrize("phase", ["advertising", "masking", "unmasking"])
@pytest.mark.sampled(every=6)
def test_not_in_the_middle_of_a_round(world: World, phase: str) -> None:
    world.create_task(cohort=3)
    devices = world.add_devices(3)
    world.start_round(devices)
    world.run_to(phase, devices)
    token = devices[0].token
    request = request_for(devices[0], generate_key())
    status, answer = send(devices[0], request)
    assert (status, answer["detail"]) == (409, "the device is in a round; ask again when that is over")
    devices[0].token = token
    for name in ANSWERED[ANSWERED.index(phase) :]:
        for device in devices:
            device.answer(name)
        world.settle()
    assert devices[0].status().phase == "committed"
    assert send(devices[0], request)[0] == 200


@pytest.mark.sampled(every=4)
def test_a_round_after_it(world: World) -> None:
    task = world.create_task(cohort=4)
    devices = world.add_devices(4)
    rotate(devices[1])
    rotate(devices[1])
    rotate(devices[3])
    for number, device in enumerate(devices, start=1):
        device.vector = np.full(9, 256 * number, np.uint32)
        device.vector[8] = 4096  # a weight of 1
        device.open_session()
    world.start_round(devices)
    world.run_to("unmasking", devices)
    for device in devices:
        device.unmasking()
    world.settle()
    [made] = world.rounds(task["task_id"])
    assert made["phase"] == "committed"
    assert made["survivors"] == sorted(device.id for device in devices)
    weights = read_weights(world.operator("GET", f"/v1/blobs/{made['weights_out']}")[1])
    np.testing.assert_array_equal(weights["w"], np.full((3, 2), 2.5, np.float32))


def test_as_often_as_it_can_be(world: World) -> None:
    (device,) = world.add_devices(1)
    for _ in range(messages.MAX_ROTATIONS):
        rotate(device)
    device.open_session()
    assert world.operator("GET", f"/v1/devices/{device.id}")[1]["rotations"] == messages.MAX_ROTATIONS
