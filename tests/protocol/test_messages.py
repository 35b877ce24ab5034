"""Every decoder of messages: strict, and nothing but MessageError for any bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from archipel.errors import CertificateError, MessageError, ProtocolError
from archipel.protocol import EnrolmentToken, Sealed, decode, encode, messages, public_bytes, seal, unseal
from archipel.protocol.identity import rotation_request
from archipel.protocol.messages import Message
from archipel.protocol.problems import make_problem
from archipel.protocol.sealed import MAX_BODY_BYTES

CORPUS = sorted((Path(__file__).parent / "corpus" / "message").glob("*.json"))
KINDS = [
    kind
    for kind in vars(messages).values()
    if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message
] + [EnrolmentToken, Sealed]


@pytest.fixture
def examples(make_round, fixed, signing_key) -> dict[type, msgspec.Struct]:
    """One of every kind, from a real round where it occurs there."""
    round_ = make_round(5, threshold=3)
    round_.advertise()
    round_.share()
    round_.spoil(4, [0])
    round_.mask([0, 1, 2])
    confirmations = round_.confirm([0, 1, 2])
    answers = round_.unmask(confirmations, [0, 1, 2])
    chain, name = round_.chains[0], round_.ids[0]
    proof = seal("enrol", messages.EnrolmentProof(server_key=fixed("server")), round_.keys[0])
    rotation = rotation_request(chain, round_.keys[0], signing_key("next"), fixed("server"))
    statement = messages.WeightsStatement(
        population="pupils", bundle="0" * 64, number=1, previous="0" * 64, kind="step", weights="1" * 64,
        task_id="2" * 32, parent="3" * 64, round_id="4" * 32, plan="5" * 64, privacy="plain", sum="6" * 64, devices=3,
        hyperparameters={"server_lr": 0.5},
    )  # fmt: skip
    instances: list[msgspec.Struct] = [
        decode("token", chain.token.body, messages.TokenCertificate),
        decode("identity", chain.identity.body, messages.IdentityCertificate),
        chain,
        chain.token,
        messages.EnrolmentRequest(chain=chain, proof=proof),
        messages.EnrolmentProof(server_key=fixed("server")),
        messages.EnrolmentResponse(device_id=name),
        decode("rotation", rotation.certificate.body, messages.RotationCertificate),
        decode("rotated", rotation.proof.body, messages.RotationProof),
        rotation,
        messages.RotationResponse(device_id=name, rotations=1),
        messages.ChallengeRequest(device_id=name),
        messages.Challenge(nonce=fixed("nonce"), expires=1.5),
        messages.SessionProof(nonce=fixed("nonce"), server_key=fixed("server")),
        messages.SessionRequest(device_id=name, proof=proof),
        messages.SessionResponse(token="secret", expires=2.5),
        round_.plan,
        messages.ServerNoise(mechanism="central", multiplier=2.5, epsilon=4.0, delta=1e-6),
        messages.Bins(low=0.5, high=10.0, count=30, scale="log", better="lower"),
        messages.CheckIn(attributes={"battery": 0.5, "model": "x", "charging": True}, versions={"digits": 3}),
        messages.CheckInResponse(plan=round_.sealed_plan, offers=[round_.sealed_plan]),
        messages.NoiseShare(deviation=149, steps=256),
        messages.SetAside(until=3.5, reason="spoils rounds (9 of the 9 rounds that it was in were spoiled)"),
        messages.Offer(
            population="p", model="digits", version=3, bundle="0" * 64, weights="1" * 64, rollout="2" * 32, serial=5
        ),
        messages.RoundTask(task_id="3" * 32, state="running", rounds=10, committed=4),
        messages.RoundStatus(round_id=round_.plan.round_id, phase="masking", phase_ends=1.0, retry_after=0.5),
        decode("advertisement", round_.requests[0].advertisement.body, messages.Advertisement),
        round_.cohort.members[0],
        round_.requests[0],
        round_.cohort_for(0),
        round_.cohort_for(0).keys[0],
        round_.complain().complaints[0],
        round_.complain(),
        round_.sent[0].shares[0],
        round_.sent[0],
        round_.survivors,
        decode("confirmation", confirmations.confirmations[0].confirmation.body, messages.Confirmation),
        messages.ConfirmRequest(confirmation=confirmations.confirmations[0].confirmation),
        confirmations.confirmations[0],
        confirmations,
        answers[name].self_seeds[0],
        answers[name],
        messages.Receipt(),
        messages.UpdateParts(held=[1, 3]),
        messages.LeaveRequest(reason="cohort"),
        messages.Piece(offset=8, length=4, sha256="a" * 64),
        messages.Pieces(size=12, pieces=[messages.Piece(offset=8, length=4, sha256="a" * 64)]),
        messages.Revocations(population="pupils", epoch=2, devices=["a" * 32], tokens=["b" * 32]),
        statement,
        messages.WeightsLog(entries=[seal("weights", statement, signing_key("server"))], newest=1),
        messages.Endorser(chain=chain, signature=confirmations.confirmations[0].confirmation.signature),
        messages.Endorsement(
            plan=round_.sealed_plan,
            survivors=round_.survivors,
            confirmation=confirmations.confirmations[0].confirmation.body,
            endorsers=[messages.Endorser(chain=chain, signature=confirmations.confirmations[0].confirmation.signature)],
        ),
        make_problem(409, "too early", "1"),
        messages.FieldProblem(pointer="#/cohort", detail="too few"),
        EnrolmentToken(
            server="http://localhost", server_key=fixed("server"), enrolment_key=fixed("enrolment"),
            publisher_keys=[fixed("publisher")], population="pupils", seed=fixed("seed"), certificate=chain.token,
        ),
        messages.Root(server_key=fixed("root"), enrolment_key=fixed("enrolment"), population="sites"),
    ]  # fmt: skip
    return {type(instance): instance for instance in instances}


def mutations(data: bytes, seed: int, count: int) -> Iterator[bytes]:
    generator = random.Random(seed)
    tokens = [b'"', b"\\", b"{", b"}", b"[", b"]", b"null", b"1e999", b"-1", b"\xff", b"\0", b"\\ud800", b",", b"true"]
    for _ in range(count):
        mutated = bytearray(data)
        for _ in range(generator.choice((1, 1, 1, 2, 4))):
            at = generator.randrange(len(mutated) + 1)
            choice = generator.randrange(5)
            if choice == 0 and at < len(mutated):
                mutated[at] = generator.randrange(256)
            elif choice == 1:
                del mutated[at : at + generator.choice((1, 2, 8))]
            elif choice == 2:
                mutated[at:at] = generator.choice(tokens)
            elif choice == 3:
                mutated[at:at] = mutated[at : at + 16]
            elif at < len(mutated):
                mutated[at] ^= 1 << generator.randrange(8)
        yield bytes(mutated)


def test_every_kind_has_an_example(examples):
    assert set(examples) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.sampled(every=6)
def test_round_trip_and_mutations(examples, kind):
    data = encode(examples[kind])
    assert decode("good", data, kind) == examples[kind]
    refused = 0
    for mutated in mutations(data, seed=len(kind.__name__), count=300):
        try:
            decode("mutated", mutated, kind)
        except MessageError:
            refused += 1
    assert refused > 30


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_corpus(path):
    data = path.read_bytes()
    accepted = set()
    for kind in KINDS:
        try:
            decode("corpus", data, kind)
        except MessageError:
            continue
        accepted.add(kind.__name__)
    assert accepted == set(), f"{path.name} was accepted"


def test_unsealing_mutated_seals(examples, make_round):
    round_ = make_round(3)
    sealed = round_.devices[0].advertise().advertisement
    key = public_bytes(round_.keys[0])
    for mutated in mutations(encode(sealed), seed=1, count=400):
        try:
            again = decode("sealed", mutated, Sealed)
            unseal("advertisement", again, key, messages.Advertisement)
        except ProtocolError:
            continue
        assert again == sealed


def test_labels_keep_statements_apart(examples, signing_key):
    key = signing_key("k")
    statement = examples[messages.EnrolmentProof]
    sealed = seal("enrol", statement, key)
    assert unseal("enrol", sealed, public_bytes(key), messages.EnrolmentProof) == statement
    for label in ("enro", "enroll", "session", ""):
        with pytest.raises(CertificateError):
            unseal(label, sealed, public_bytes(key), messages.EnrolmentProof)


@pytest.mark.parametrize("key", [b"", bytes(31), bytes(33), b"\xff" * 32])
def test_keys_that_are_none(examples, signing_key, key):
    sealed = seal("enrol", examples[messages.EnrolmentProof], signing_key("k"))
    with pytest.raises(CertificateError):
        unseal("enrol", sealed, key, messages.EnrolmentProof)


def test_a_body_has_a_limit():
    sealed = Sealed(body=bytes(MAX_BODY_BYTES + 1), signature=bytes(64))
    with pytest.raises(MessageError, match="limit"):
        unseal("plan", sealed, bytes(32), messages.RoundPlan)


def test_identifiers_end_where_they_end():
    # In Python "$" matches before a final newline, too.
    for kind, good in ((messages.DeviceId, "a" * 32), (messages.Digest, "b" * 64), (messages.Name, "pupils")):
        assert msgspec.json.decode(msgspec.json.encode(good), type=kind) == good
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(msgspec.json.encode(good + "\n"), type=kind)


def test_secrets_are_not_shown(examples):
    assert "secret" not in repr(examples[messages.SessionResponse])
    answer = examples[messages.Unmasking]
    for revealed in (*answer.self_seeds, *answer.mask_keys):
        assert repr(revealed.share) not in repr(answer)


STEPS = {
    "share": messages.Cohort,
    "complain": messages.Shares,
    "mask": messages.Complaints,
    "confirm": messages.Survivors,
    "unmask": messages.Confirmations,
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.sampled(every=5)
def test_a_participant_refuses_every_changed_message(make_round, step):
    def until(step_: str):
        round_ = make_round(4, threshold=3, min_cohort=3, length=4)
        round_.advertise()
        message = round_.cohort_for(0)
        for act in ("share", "complain", "mask", "confirm"):
            if act == step_:
                break
            if act == "share":
                round_.share()
                round_.spoil(3, [0])
                message = round_.inbox(0)
            elif act == "complain":
                message = round_.complain(range(3))
            elif act == "mask":
                round_.mask(range(3))
                message = round_.survivors
            else:
                message = round_.confirm(range(3))
        return round_, message

    round_, good = until(step)
    changed = 0
    for mutated in mutations(encode(good), seed=3, count=5_000):
        try:
            message = decode("mutated", mutated, STEPS[step])
        except MessageError:
            continue
        if message == good:
            continue
        changed += 1
        device = round_.devices[0]
        with pytest.raises(ProtocolError):
            device.mask(round_.vectors[0], message) if step == "mask" else getattr(device, step)(message)
        if changed == 60:
            break
        round_, good = until(step)
    assert changed == 60


def test_the_sum_is_right_or_there_is_none(make_round):
    round_ = make_round(4, threshold=2 + 1, length=4)
    round_.advertise()
    round_.share()
    round_.mask()
    answers = round_.unmask(round_.confirm())
    first = round_.ids[0]
    changed = 0
    for mutated in mutations(encode(answers[first]), seed=4, count=5_000):
        try:
            message = decode("mutated", mutated, messages.Unmasking)
        except MessageError:
            continue
        if message == answers[first]:
            continue
        changed += 1
        with pytest.raises(ProtocolError):
            round_.sum({**answers, first: message})
        if changed == 200:
            break
    assert changed == 200
