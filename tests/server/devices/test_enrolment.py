"""Enrolment with one-time tokens, and sessions by signing a nonce."""

from __future__ import annotations

import secrets

import msgspec

from archipel.bundle import generate_key
from archipel.protocol import identity, messages
from archipel.protocol.sealed import Sealed, public_bytes, seal
from tests.support.devices import Device
from tests.support.world import World


def test_a_token_enrols_one_device_and_again_the_same(world: World, device: Device) -> None:
    assert device.ask_to_enrol() == (200, {"device_id": device.id})
    # The answer was lost, and by the time the device asks again the token has expired.
    world.clock.now += 2e6
    assert device.ask_to_enrol() == (200, {"device_id": device.id})
    device.key = generate_key()
    status, answer = device.ask_to_enrol()
    assert status == 403, answer
    world.clock.now -= 2e6
    status, answer = device.ask_to_enrol()
    assert status == 409, answer
    assert "used by another device" in answer["detail"]


def test_a_device_enrols_once(world: World, device: Device, device_maker: type[Device]) -> None:
    device.ask_to_enrol()
    second = device_maker(world.transport, world.keys, world.settings.public_key)
    second.key = device.key
    status, answer = second.ask_to_enrol()
    assert status == 409, answer
    assert "with another token" in answer["detail"]


def test_an_expired_token(world: World, device: Device) -> None:
    world.clock.now += 1e6 + 1
    status, answer = device.ask_to_enrol()
    assert status == 403, answer
    assert "expired" in answer["detail"]


def test_a_token_of_another_enrolment_key(world: World, device_maker: type[Device]) -> None:
    foreign = type(world.keys)(publisher=world.keys.publisher)
    status, answer = device_maker(world.transport, foreign, world.settings.public_key).ask_to_enrol()
    assert status == 403, answer


def test_a_proof_for_another_server(world: World, device_maker: type[Device]) -> None:
    status, answer = device_maker(world.transport, world.keys, public_bytes(generate_key())).ask_to_enrol()
    assert status == 403, answer


def test_a_proof_by_another_key(device: Device) -> None:
    request = identity.enrolment_request(device.enrolment_token, device.key)
    proof = seal("enrol", messages.EnrolmentProof(server_key=device.server_key), generate_key())
    status, answer = device.call("POST", "/v1/devices", messages.EnrolmentRequest(chain=request.chain, proof=proof))
    assert status == 403, answer


def test_a_session(world: World, device: Device) -> None:
    device.enrol().open_session()
    assert device.check_in() is None
    # Its end, which the cache of sessions does not prolong.
    world.clock.now += world.settings.session_seconds + 0.1
    status, answer = device.call("POST", "/v1/check-ins", messages.CheckIn())
    assert status == 401, answer
    device.open_session()
    assert device.check_in() is None


def test_only_hashes_of_tokens_are_stored(world: World, device: Device) -> None:
    device.enrol().open_session()
    for path in world.settings.path("").rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert device.token.encode() not in data
            assert world.operator_token.encode() not in data


def test_a_challenge_is_good_once(device: Device) -> None:
    device.enrol()
    request = device.session_request(device.challenge().nonce)
    device.ask("POST", "/v1/sessions", messages.SessionResponse, request)
    status, answer = device.call("POST", "/v1/sessions", request)
    assert status == 403, answer
    assert "unknown, used or expired" in answer["detail"]


def test_a_challenge_expires(world: World, device: Device) -> None:
    device.enrol()
    nonce = device.challenge().nonce
    world.clock.now += world.settings.challenge_seconds + 1
    assert device.call("POST", "/v1/sessions", device.session_request(nonce))[0] == 403


def test_nonces_and_proofs_of_others_are_refused(world: World, device: Device) -> None:
    device.enrol()
    (other,) = world.add_devices(1)
    other.token = ""
    nonce = other.challenge().nonce
    assert device.call("POST", "/v1/sessions", device.session_request(nonce))[0] == 403
    assert device.call("POST", "/v1/sessions", device.session_request(secrets.token_bytes(32)))[0] == 403
    mine = device.session_request(device.challenge().nonce)
    stolen = messages.SessionRequest(device_id=other.id, proof=mine.proof)
    assert other.call("POST", "/v1/sessions", stolen)[0] == 403
    elsewhere = seal(
        "session",
        messages.SessionProof(nonce=device.challenge().nonce, server_key=public_bytes(generate_key())),
        device.key,
    )
    request = messages.SessionRequest(device_id=device.id, proof=elsewhere)
    assert device.call("POST", "/v1/sessions", request)[0] == 403
    # None of that has used up what the devices hold.
    device.ask("POST", "/v1/sessions", messages.SessionResponse, mine)


def test_a_device_that_is_not_enrolled(device: Device) -> None:
    status, answer = device.call("POST", "/v1/challenges", messages.ChallengeRequest(device_id=device.id))
    assert status == 404, answer
    status, answer = device.call("POST", "/v1/sessions", device.session_request(bytes(32)))
    assert status == 404, answer


def test_asking_for_many_challenges_in_a_devices_name_does_not_keep_it_out(world: World, device: Device) -> None:
    device.enrol()
    for _ in range(20):
        last = device.challenge()
    with world.services.database.engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM used_nonces").scalar() == 0
    device.ask("POST", "/v1/sessions", messages.SessionResponse, device.session_request(last.nonce))


def test_an_edge_server_takes_no_part_in_rounds_of_devices(world: World, device: Device) -> None:
    seed = secrets.token_bytes(32)
    certificate = identity.mint_token(
        world.keys.enrolment, population="pupils", not_after=2**40, seed=seed, kind="aggregator"
    )
    device.enrolment_token = msgspec.structs.replace(device.enrolment_token, seed=seed, certificate=certificate)
    device.enrol().open_session()
    task = world.create_task()
    assert device.check_in() is None
    assert world.task(task["task_id"])["waiting"] == 0
    world.add_devices(1)[0].check_in()
    assert world.task(task["task_id"])["waiting"] == 1


def test_garbage_signatures(device: Device) -> None:
    device.enrol()
    for body in (b"", b"{}", b"\xff" * 100):
        request = messages.SessionRequest(device_id=device.id, proof=Sealed(body=body, signature=b"\0" * 64))
        assert device.call("POST", "/v1/sessions", request)[0] == 403
