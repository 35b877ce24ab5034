"""What the server takes and refuses in a round over neighbours, phase by phase, and whom it blames."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.bundle import open_bundle
from archipel.errors import CertificateError, ProvenanceError
from archipel.protocol.identity import issue_identity, mint_token
from archipel.protocol.messages import Endorsement, WeightsLog, WeightsStatement
from archipel.protocol.provenance import History, LogReader, check_endorsement
from archipel.protocol.sealed import public_bytes, unseal
from archipel.protocol.secagg_plus import messages as packed
from archipel.protocol.secagg_plus.member import Member, RoundKeys, sign_member
from tests.support.devices import ANSWERED, POPULATION
from tests.support.neighbour_devices import NeighbourDevice, add_devices, create_task
from tests.support.world import World


@pytest.fixture
def begun(world: World, tmp_path: Path) -> tuple[World, dict[str, Any], list[NeighbourDevice]]:
    """A round of ten devices in phase advertising."""
    task, policy = create_task(world, tmp_path)
    devices = add_devices(world, 10, policy)
    world.start_round(devices)
    return world, task, devices


def to(world: World, devices: list[NeighbourDevice], phase: str) -> None:
    world.run_to(phase, devices)


@pytest.mark.sampled(every=4)
def test_a_round_knows_one_protocol_only(begun: Any, tmp_path: Path) -> None:
    world, _, devices = begun
    device = devices[0]
    for method, path in (("GET", "cohort"), ("GET", "shares"), ("GET", "complaints"), ("GET", "survivors")):
        status, answer = device.call(method, f"{device.round}/{path}")
        assert status == 404, (answer, path)
    # And the other way round.
    plain = world.add_devices(5)
    world.create_task(protocol="complete")
    world.start_round(plain)
    for path in ("invitation", "inbox", "partners", "question", "inclusions"):
        assert plain[0].call("GET", f"{plain[0].round}/{path}")[0] == 404, path


@pytest.mark.sampled(every=4)
def test_members_that_are_not_the_device(begun: Any) -> None:
    _, _, devices = begun
    device, other = devices[:2]
    good, others = device.over.advertise(), other.over.advertise()
    assert device.send("member", others)[0] == 422
    read = msgspec.msgpack.decode(good, type=Member)
    forged = msgspec.structs.replace(read, keys=bytes(96))
    assert device.send("member", msgspec.msgpack.encode(forged))[0] == 422
    # Of another key than the session's device has: its chain does not lead there.
    stranger = Ed25519PrivateKey.generate()
    keys = RoundKeys(read.keys[:32], read.keys[32:64], read.keys[64:])
    wrong = sign_member(device.terms.session, keys, read.chain, stranger)
    assert device.send("member", wrong)[0] == 422
    # Its own key, by certificates that it has made up: not those that the server knows, so they are verified.
    token = mint_token(stranger, population=POPULATION, not_after=2**40, seed=bytes(32))
    made_up = issue_identity(bytes(32), token, public_bytes(device.key))
    assert device.send("member", sign_member(device.terms.session, keys, made_up, device.key))[0] == 422
    flipped = msgspec.structs.replace(read.chain.token, signature=bytes(64))
    unsigned = msgspec.structs.replace(read.chain, token=flipped)
    assert device.send("member", sign_member(device.terms.session, keys, unsigned, device.key))[0] == 422
    assert device.send("member", good)[0] == 200
    # Repeated, it is the same; another one does not replace it.
    assert device.send("member", good)[0] == 200
    again = RoundKeys(read.keys[32:64], read.keys[:32], read.keys[64:])
    assert device.send("member", sign_member(device.terms.session, again, read.chain, device.key))[0] == 409


@pytest.mark.sampled(every=3)
def test_forbidden_keys_that_a_device_signs_are_its_fault(begun: Any) -> None:
    world, task, devices = begun
    device = devices[0]
    zero = RoundKeys(bytes(32), bytes([1]) + bytes(31), bytes(32))
    assert device.send("member", sign_member(device.terms.session, zero, device.chain, device.key))[0] == 422
    (info,) = world.rounds(task["task_id"])
    assert info["faults"] == [{"device_id": device.id, "reason": "forbidden keys advertised"}]


@pytest.mark.sampled(every=3)
def test_what_nobody_can_have_drawn_or_dealt(begun: Any) -> None:
    world, _, devices = begun
    to(world, devices, "sharing")
    device = devices[0]
    neighbours = device.draw()
    good = device.over.deal(neighbours)
    assert device.try_fetch("POST", "neighbours", packed.Drawn(places=[0]))[0] == 422
    for wrong in (
        msgspec.structs.replace(good, places=good.places[:-1]),
        msgspec.structs.replace(good, dealt=good.dealt[:-1]),
        msgspec.structs.replace(good, places=[good.places[0]] * len(good.places)),
        msgspec.structs.replace(good, places=[11, *good.places[1:]]),
    ):
        assert device.send("dealt", wrong)[0] == 422
    assert device.send("dealt", good)[0] == 200
    assert device.try_fetch("GET", "inbox")[0] == 409


@pytest.mark.sampled(every=3)
def test_what_devices_cannot_say_of_their_envelopes(begun: Any) -> None:
    world, _, devices = begun
    to(world, devices, "complaining")
    device = devices[0]
    inbox = device.fetch("GET", "inbox", packed.Inbox)
    # It has not dealt to itself, for one.
    for stranger in {*range(10)} - {*inbox.dealers}:
        assert device.send("refused", packed.Refused(dealers=[stranger]))[0] == 422
    assert device.send("refused", packed.Refused(dealers=inbox.dealers[:1]))[0] == 200


@pytest.mark.sampled(every=4)
def test_answers_of_a_wrong_form(begun: Any) -> None:
    world, _, devices = begun
    to(world, devices, "unmasking")
    device = devices[0]
    good = device.last_answer()
    for wrong in (
        msgspec.structs.replace(good, seeds=good.seeds[:-4]),
        msgspec.structs.replace(good, mask_keys=bytes(36)),
        msgspec.structs.replace(good, presence=bytes(64)),
    ):
        assert device.send("answer", wrong)[0] == 422
    assert device.send("answer", good)[0] == 200
    # Another right answer does not replace the first one.
    assert device.send("answer", msgspec.structs.replace(good, seeds=good.seeds[:-4] + bytes(4)))[0] == 409


@pytest.mark.sampled(every=4)
def test_signatures_of_a_wrong_number(begun: Any) -> None:
    world, _, devices = begun
    to(world, devices, "confirming")
    device = devices[0]
    confirmed = device.over.confirm(device.fetch("GET", "question", packed.Question))
    for wrong in (b"", confirmed.signatures[:-64], confirmed.signatures + bytes(64)):
        assert device.send("inclusions", packed.Confirmed(signatures=wrong))[0] == 422
    assert device.send("inclusions", confirmed)[0] == 200


@pytest.mark.sampled(every=4)
def test_devices_sign_that_the_round_took_place(begun: Any) -> None:
    world, task, devices = begun
    for phase in ANSWERED:
        for device in devices:
            device.answer(phase)
        world.settle()
    base = f"/v1/populations/pupils/weights-log/{task['bundle']}"
    status, answer = world.operator("GET", base)
    assert status == 200, answer
    start, step = msgspec.convert(answer, WeightsLog).entries
    own = unseal("weights", start, world.settings.public_key, WeightsStatement).weights
    reader = LogReader(
        History(population="pupils", bundle=task["bundle"]), own, world.settings.public_key, lambda entry: 1.0
    )
    reader.add(start)
    entry = reader.add(step)
    status, answer = world.operator("GET", f"{base}/{entry.number}/endorsement")
    evidence = msgspec.convert(answer, Endorsement)
    manifest = open_bundle(world.bundle_file, world.settings.trusted_keys).manifest
    keys = {
        "server_key": world.settings.public_key, "enrolment_key": public_bytes(world.keys.enrolment),
    }  # fmt: skip
    check_endorsement(entry, evidence, manifest, reader, **keys)
    # The root of another cohort, one signature too few, one device twice, and a survivor that was not there.
    twice = [evidence.endorsers[0], *evidence.endorsers[:-1]]
    for wrong, error in (
        ({"confirmation": bytes(32)}, CertificateError),
        ({"confirmation": bytes(31)}, ProvenanceError),
        ({"endorsers": evidence.endorsers[1:]}, ProvenanceError),
        ({"endorsers": twice}, ProvenanceError),
        ({"survivors": msgspec.structs.replace(evidence.survivors, devices=["0" * 32])}, ProvenanceError),
    ):
        with pytest.raises(error):
            check_endorsement(entry, msgspec.structs.replace(evidence, **wrong), manifest, reader, **keys)
