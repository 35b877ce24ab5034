"""What a round's routes accept, and when: idempotence, phases, lengths, digests, foreign content."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from archipel.protocol import messages
from archipel.protocol.sealed import Sealed, encode, seal
from archipel.protocol.secagg import survivors_digest
from tests.support.devices import Device, Transport
from tests.support.world import World

PHASES = ("advertising", "sharing", "complaining", "masking", "confirming", "unmasking")
PUTS = {
    "advertising": "advertisement",
    "sharing": "shares",
    "complaining": "complaints",
    "masking": "update",
    "confirming": "confirmation",
    "unmasking": "unmasking",
}
READABLE_FROM = {
    "cohort": "sharing", "shares": "complaining", "complaints": "masking", "survivors": "confirming",
    "confirmations": "unmasking",
}  # fmt: skip


class Recorder:
    """Remembers what each device sent, to send it again."""

    def __init__(self, devices: list[Device]) -> None:
        self.sent: dict[tuple[str, str], tuple[bytes, dict[str, str]]] = {}
        for device in devices:
            device.transport = self._recording(device, device.transport)

    def _recording(self, device: Device, transport: Transport) -> Transport:
        def record(method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
            if method == "PUT":
                self.sent[device.id, path.rsplit("/", 1)[1]] = (body or b"", headers)
            return transport(method, path, body, headers)

        return record


@pytest.fixture
def fleet(world: World) -> list[Device]:
    world.create_task(cohort=4, min_cohort=3, threshold=3)
    devices = world.add_devices(4)
    world.start_round(devices)
    return devices


def variation(name: str, body: bytes) -> bytes:
    """Other bytes of the same length and shape."""
    if name == "update":
        return bytes([body[0] ^ 1]) + body[1:]
    return body + b" "


@pytest.mark.sampled(every=3)
def test_who_is_in_a_round_is_told_to_ask_more_often(world: World, fleet: list[Device]) -> None:
    [stranger] = world.add_devices(1)
    waiting = stranger.ask("POST", "/v1/check-ins", messages.CheckInResponse, messages.CheckIn()).retry_after
    assert fleet[0].status().retry_after == waiting / 2


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.sampled(every=6)
def test_a_message_again_is_acknowledged_and_another_one_refused(world: World, fleet: list[Device], phase: str) -> None:
    recorder = Recorder(fleet)
    world.run_to(phase, fleet)
    first, name = fleet[0], PUTS[phase]
    first.answer(phase)
    body, headers = recorder.sent[first.id, name]
    path = f"{first.round}/{name}"
    assert first.call("PUT", path, body, headers)[0] == 200
    other = variation(name, body)
    changed = {"Digest-SHA256": hashlib.sha256(other).hexdigest()} if name == "update" else {}
    status, answer = first.call("PUT", path, other, headers | changed)
    assert status == 409, answer
    assert "cannot be replaced" in answer["detail"]
    # The phase goes on without the late answer; a repeated message is still acknowledged after it.
    for device in fleet[1:3]:
        device.answer(phase)
    world.clock.now += 121
    # Only one step: at the end of unmasking the next one would commit the round.
    world.coordinator.step()
    assert first.call("PUT", path, body, headers)[0] == 200
    token = {"Authorization": f"Bearer {fleet[3].token}"}
    status, answer = fleet[3].call("PUT", path, other, headers | changed | token)
    assert status == 410, answer
    assert f"phase {phase} is over" in answer["detail"]
    stored = world.stored("updates")
    assert not any("/." in name for name in stored)
    assert len(stored) == (0 if phase in ("advertising", "sharing", "complaining") else 3 if phase == "masking" else 4)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.sampled(every=6)
def test_too_early(world: World, fleet: list[Device], phase: str) -> None:
    world.run_to(phase, fleet)
    device = fleet[0]
    bodies = {
        "shares": messages.Shares(shares=[]),
        "complaints": messages.Complaints(complaints=[]),
        "update": b"\0" * 27,
        "confirmation": messages.ConfirmRequest(confirmation=Sealed(body=b"", signature=b"")),
        "unmasking": messages.Unmasking(self_seeds=[], mask_keys=[]),
    }
    for later in PHASES[PHASES.index(phase) + 1 :]:
        headers = {"Digest-SHA256": hashlib.sha256(b"\0" * 27).hexdigest()}
        status, answer = device.call("PUT", f"{device.round}/{PUTS[later]}", bodies[PUTS[later]], headers)
        assert status == 409, (answer, later)
        assert "too early" in answer["detail"]
    for name, begins in READABLE_FROM.items():
        status, answer = device.call("GET", f"{device.round}/{name}")
        if PHASES.index(phase) >= PHASES.index(begins):
            assert status == 200, name
        else:
            assert status == 409, (answer, name)


@pytest.mark.parametrize("phase", PHASES[:-1])
@pytest.mark.sampled(every=6)
def test_a_device_that_dropped_out_can_do_nothing_more(world: World, fleet: list[Device], phase: str) -> None:
    recorder = Recorder(fleet)
    world.run_to(phase, fleet)
    for device in fleet[:3]:
        device.answer(phase)
    world.clock.now += 121
    world.settle()
    following = PHASES[PHASES.index(phase) + 1]
    for device in fleet[:3]:
        device.answer(following)
    gone, name = fleet[3], PUTS[following]
    body, headers = recorder.sent[fleet[0].id, name]
    status, answer = gone.call("PUT", f"{gone.round}/{name}", body, headers | {"Authorization": f"Bearer {gone.token}"})
    assert status == 410, answer
    assert f"did not complete phase {phase}" in answer["detail"]
    for name, begins in READABLE_FROM.items():
        if begins == following:
            assert gone.call("GET", f"{gone.round}/{name}")[0] == 410
    assert gone.status().phase == following


@pytest.mark.sampled(every=4)
def test_a_finished_round_is_gone_with_its_reason(world: World, fleet: list[Device]) -> None:
    recorder = Recorder(fleet)
    world.run_to("masking", fleet)
    fleet[0].masking()
    world.clock.now += 61
    world.settle()
    device = fleet[0]
    for name in ("advertisement", "shares", "update"):
        status, answer = device.call("PUT", f"{device.round}/{name}", *recorder.sent[device.id, name])
        assert status == 410, answer
        assert "1 masked updates arrived" in answer["detail"]
    for name in READABLE_FROM:
        assert device.call("GET", f"{device.round}/{name}")[0] == 410


@pytest.mark.sampled(every=4)
def test_the_checks_of_an_upload(world: World, fleet: list[Device]) -> None:
    world.run_to("masking", fleet)
    device = fleet[0]
    path, good = f"{device.round}/update", b"\1" * (9 * device.plan.modulus_bits // 8)
    digest = {"Digest-SHA256": hashlib.sha256(good).hexdigest()}

    def refused(body: bytes, headers: dict[str, str], status: int, kind: str) -> str:
        found, answer = device.call("PUT", path, body, headers)
        assert found == status, answer
        assert answer["type"] == f"urn:archipel:problem:{kind}"
        return str(answer["detail"])

    refused(good, {}, 400, "bad_request")
    refused(good, {"Digest-SHA256": digest["Digest-SHA256"].upper() + "A"}, 400, "bad_request")
    assert "an update of this round has" in refused(good[:-1], digest, 422, "unprocessable")
    refused(good + b"\0", digest, 413, "too_large")
    assert "SHA-256 is" in refused(good[:-1] + b"\2", digest, 422, "unprocessable")
    with world.app.test_client() as client:
        headers = {"Authorization": f"Bearer {device.token}", **digest}
        response = client.put(path, data=good, headers=headers, environ_overrides={"HTTP_TRANSFER_ENCODING": "chunked"})
        assert response.status_code == 411
        # The connection breaks in the middle.
        length = {"CONTENT_LENGTH": str(len(good))}
        broken = client.put(path, data=good[:5], headers=headers, environ_overrides=length)
        assert broken.status_code == 400
    assert world.stored("updates") == {}
    assert device.call("PUT", path, good, digest)[0] == 200


@pytest.mark.sampled(every=3)
def test_an_advertisement_for_something_else(world: World, fleet: list[Device]) -> None:
    device, other = fleet[0], fleet[1]
    path = f"{device.round}/advertisement"
    good = device.participant.advertise()
    statement = msgspec.json.decode(good.advertisement.body, type=messages.Advertisement)
    small = (1).to_bytes(32, "little")
    bad = {
        "another device's": other.participant.advertise().advertisement,
        "a key of small order": seal("advertisement", msgspec.structs.replace(statement, cipher_key=small), device.key),
        "another root": seal("advertisement", msgspec.structs.replace(statement, envelope_root=small), device.key),
        "another round": seal("advertisement", msgspec.structs.replace(statement, round_id="0" * 32), device.key),
        "another plan": seal("advertisement", msgspec.structs.replace(statement, plan="0" * 64), device.key),
        "one key for both": seal(
            "advertisement", msgspec.structs.replace(statement, mask_key=statement.cipher_key), device.key
        ),
        "another label": seal("confirmation", statement, device.key),
        "garbage": Sealed(body=b"{", signature=b"\0" * 64),
    }
    for what, sealed in bad.items():
        status, answer = device.call("PUT", path, msgspec.structs.replace(good, advertisement=sealed))
        assert status == 422, (answer, what)
    for keys in (b"", good.envelope_keys[32:], good.envelope_keys + small, small + good.envelope_keys[32:]):
        assert device.call("PUT", path, msgspec.structs.replace(good, envelope_keys=keys))[0] == 422
    assert device.call("PUT", path, good)[0] == 200


@pytest.mark.sampled(every=3)
def test_shares_that_do_not_fit_the_cohort(world: World, fleet: list[Device]) -> None:
    world.run_to("sharing", fleet)
    device = fleet[0]
    cohort = device.ask("GET", f"{device.round}/cohort", messages.Cohort)
    good = device.participant.share(cohort).shares
    own = msgspec.structs.replace(good[0], peer=device.id)
    foreign = msgspec.structs.replace(good[0], peer="0" * 32)
    short = msgspec.structs.replace(good[0], ciphertext=good[0].ciphertext[:-1])
    unsigned = msgspec.structs.replace(good[0], signature=good[1].signature)
    for shares in (
        [], good[:-1], [*good, good[0]], [*good, own], [*good[:-1], foreign], [short, *good[1:]], [unsigned, *good[1:]],
    ):  # fmt: skip
        status, answer = device.call("PUT", f"{device.round}/shares", messages.Shares(shares=shares))
        assert status == 422, answer
    assert device.call("PUT", f"{device.round}/shares", messages.Shares(shares=good))[0] == 200


@pytest.mark.sampled(every=4)
def test_complaints_that_show_nothing(world: World, fleet: list[Device]) -> None:
    """The envelope opens; or the complaint is in another's name. A refused one may be followed by a right one."""
    world.run_to("complaining", fleet)
    device, path = fleet[0], f"{fleet[0].round}/complaints"
    inbox = device.ask("GET", f"{device.round}/shares", messages.Shares)
    envelope, participant = inbox.shares[0], device.participant
    place = participant._session.peers[envelope.peer].place
    false = messages.Complaint(
        complainer=device.id,
        accused=envelope.peer,
        ciphertext=envelope.ciphertext,
        signature=envelope.signature,
        key=participant._envelope_private(place),
        path=participant._tree.path(place),
    )
    for changes in ({}, {"complainer": fleet[1].id}, {"signature": bytes(64)}, {"accused": device.id}):
        bad = messages.Complaints(complaints=[msgspec.structs.replace(false, **changes)])
        status, answer = device.call("PUT", path, bad)
        assert status == 422, answer
    good = participant.complain(inbox)
    assert good == messages.Complaints(complaints=[])
    assert device.call("PUT", path, good)[0] == 200


@pytest.mark.sampled(every=4)
def test_a_confirmation_of_other_survivors(world: World, fleet: list[Device]) -> None:
    world.run_to("confirming", fleet)
    device = fleet[0]
    survivors = device.ask("GET", f"{device.round}/survivors", messages.Survivors)
    good = device.participant.confirm(survivors)
    statement = msgspec.json.decode(good.body, type=messages.Confirmation)
    fewer = survivors_digest(messages.Survivors(devices=survivors.devices[:-1]))
    for bad in (
        seal("confirmation", msgspec.structs.replace(statement, survivors=fewer), device.key),
        seal("confirmation", msgspec.structs.replace(statement, cohort="0" * 64), device.key),
        seal("confirmation", msgspec.structs.replace(statement, plan="0" * 64), device.key),
        seal("confirmation", msgspec.structs.replace(statement, complaints="0" * 64), device.key),
        fleet[1].participant.confirm(survivors),
    ):
        request = messages.ConfirmRequest(confirmation=bad)
        status, answer = device.call("PUT", f"{device.round}/confirmation", request)
        assert status == 422, answer
    request = messages.ConfirmRequest(confirmation=good)
    assert device.call("PUT", f"{device.round}/confirmation", request)[0] == 200


@pytest.mark.sampled(every=4)
def test_unmasking_shares_that_were_not_asked_for(world: World, fleet: list[Device]) -> None:
    world.run_to("masking", fleet)
    for device in fleet[:3]:
        device.masking()
    world.clock.now += 61
    world.settle()
    for device in fleet[:3]:
        device.confirming()
    world.settle()
    device, path = fleet[0], f"{fleet[0].round}/unmasking"
    confirmations = device.ask("GET", f"{device.round}/confirmations", messages.Confirmations)
    good = device.participant.unmask(confirmations)
    assert [share.device for share in good.mask_keys] == [fleet[3].id]
    both = messages.RevealedShare(device=fleet[1].id, share=good.mask_keys[0].share)
    for bad in (
        messages.Unmasking(self_seeds=[], mask_keys=good.mask_keys),
        messages.Unmasking(self_seeds=good.self_seeds, mask_keys=[]),
        messages.Unmasking(self_seeds=good.self_seeds, mask_keys=[*good.mask_keys, both]),
        messages.Unmasking(
            self_seeds=good.self_seeds, mask_keys=[messages.RevealedShare(device=fleet[3].id, share=b"\1")]
        ),
    ):
        status, answer = device.call("PUT", path, bad)
        assert status == 422, answer
    assert device.call("PUT", path, good)[0] == 200
    assert encode(good)


@pytest.mark.sampled(every=4)
def test_the_status_for_the_operator(world: World, fleet: list[Device]) -> None:
    status, answer = world.operator("GET", fleet[0].round)
    assert (status, answer["phase"]) == (200, "advertising")
    assert answer["phase_ends"] == world.clock.now + 120
    assert world.operator("GET", f"/v1/rounds/{'0' * 32}")[0] == 404
