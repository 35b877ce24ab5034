"""The committed vectors: the package reproduces every case and refuses every failure with the error named there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel import errors
from archipel.bundle.roles import Program, Update
from archipel.protocol import (
    Layout,
    Participant,
    decode,
    device_id,
    pack,
    plan_digest,
    unmask_sum,
    unpack,
    unseal,
    verify_chain,
)
from archipel.protocol.identity import read_chain, rotation_request, verify_rotation
from archipel.protocol.messages import (
    Chain,
    Cohort,
    Complaints,
    Confirmations,
    RotationRequest,
    RoundPlan,
    Shares,
    Survivors,
    Unmasking,
)
from archipel.protocol.sealed import Sealed
from archipel.protocol.secagg import keys, masks, shamir

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "vectors" / "protocol"


def load(name: str) -> dict:
    return json.loads((FOLDER / name).read_text())


IDENTITY, SHAMIR, MASKS, FIXED, ROUND, ROTATION = (
    load(f"{name}.json") for name in ("identity", "shamir", "masks", "fixed_point", "round", "rotation")
)


def named(cases: list[dict]) -> dict:
    return {"argvalues": cases, "ids": [case["name"] for case in cases]}


def refusal(name: str):
    """Exactly this class: a ShareError is not good enough for a ConsistencyError."""
    expected = getattr(errors, name)
    return pytest.raises(expected, check=lambda error: type(error) is expected)


def read(value: object, kind: type):
    return decode("vector", json.dumps(value).encode(), kind)


@pytest.mark.sampled(every=4)
def test_the_files_are_what_the_script_makes(tmp_path):
    subprocess.run([sys.executable, ROOT / "scripts" / "make_vectors.py", tmp_path], check=True, capture_output=True)
    assert {path.name for path in FOLDER.glob("*.json")} == {path.name for path in tmp_path.iterdir()}
    for made in tmp_path.iterdir():
        assert (FOLDER / made.name).read_text() == made.read_text(), f"{made.name} is stale: run make_vectors.py"


@pytest.mark.parametrize("case", **named(IDENTITY["cases"]))
def test_identity(case):
    chain = read(case["chain"], Chain)
    arguments = {"population": case["population"], "now": case["now"]}
    enrolment_key = bytes.fromhex(IDENTITY["enrolment_key"])
    if case["error"]:
        with refusal(case["error"]):
            verify_chain(chain, enrolment_key, **arguments)
        return
    device = verify_chain(chain, enrolment_key, **arguments)
    assert device.device_key.hex() == IDENTITY["device_key"]
    assert device.device_id == device_id(device.device_key) == IDENTITY["device_id"]


@pytest.mark.parametrize("case", **named(ROTATION["chains"]))
def test_rotated_chains(case):
    chain, enrolment_key = read(case["chain"], Chain), bytes.fromhex(ROTATION["enrolment_key"])
    if case["error"]:
        with refusal(case["error"]):
            verify_chain(chain, enrolment_key)
        return
    device = verify_chain(chain, enrolment_key, population="pupils")
    assert (device.device_key.hex(), device.device_id) == (case["key"], ROTATION["device_id"])
    assert device.rotations == len(chain.rotations)
    assert read_chain(chain) == (device.device_id, device.device_key)


@pytest.mark.parametrize("case", **named(ROTATION["requests"]))
def test_rotation_requests(case):
    chain, request = read(case["chain"], Chain), read(case["request"], RotationRequest)
    keys = [bytes.fromhex(ROTATION[name]) for name in ("enrolment_key", "server_key")]
    if case["error"]:
        with refusal(case["error"]):
            verify_rotation(request, chain, *keys)
        return
    extended, device = verify_rotation(request, chain, *keys)
    assert (device.device_key.hex(), device.device_id) == (case["key"], ROTATION["device_id"])
    assert verify_chain(extended, keys[0]) == device
    if len(extended.rotations) > len(chain.rotations):
        old, new = (
            Ed25519PrivateKey.from_private_bytes(bytes.fromhex(ROTATION["key_seeds"][device.rotations - back]))
            for back in (1, 0)
        )
        assert rotation_request(chain, old, new, keys[1]) == request


@pytest.mark.parametrize("case", **named(SHAMIR["cases"]))
def test_shamir(case):
    points = [(x, bytes.fromhex(y)) for x, y in case["points"]]
    if case["error"]:
        with refusal(case["error"]):
            shamir.reconstruct(points, SHAMIR["threshold"])
    else:
        assert shamir.reconstruct(points, SHAMIR["threshold"]).hex() == SHAMIR["secret"]


def test_shamir_split():
    drawn = iter([bytes.fromhex(SHAMIR["randomness"])[:64], bytes.fromhex(SHAMIR["randomness"])[64:]])
    shares = shamir.split(bytes.fromhex(SHAMIR["secret"]), SHAMIR["threshold"], 5, lambda count: next(drawn))
    assert [share.hex() for share in shares] == SHAMIR["shares"]


def test_keys():
    private, peer = bytes.fromhex(MASKS["private"]), bytes.fromhex(MASKS["peer_public"])
    public = keys.public_key(private)
    assert public.hex() == MASKS["public"]
    shared = keys.agree(private, peer)
    assert shared == keys.agree(bytes.fromhex(MASKS["peer_private"]), public)
    assert shared.hex() == MASKS["shared"]
    salt = keys.round_salt(MASKS["round_id"], MASKS["plan_digest"])
    assert keys.envelope_key(shared, salt, public, peer).hex() == MASKS["keys"]["envelope"]
    assert keys.envelope_key(shared, salt, peer, public).hex() != MASKS["keys"]["envelope"]
    for one, other in ((public, peer), (peer, public)):
        assert keys.pairwise_mask_key(shared, salt, one, other).hex() == MASKS["keys"]["pairwise-mask"]
    assert keys.self_mask_key(bytes.fromhex(MASKS["seed"]), salt, public).hex() == MASKS["keys"]["self-mask"]


@pytest.mark.parametrize("case", MASKS["expansions"], ids=lambda case: f"{case['length']}-{case['modulus_bits']}")
def test_masks(case):
    vector = np.zeros(case["length"], np.uint32)
    key = bytes.fromhex(MASKS["keys"]["pairwise-mask"])
    masks.apply_mask(vector, key, 1)
    masks.reduce(vector, case["modulus_bits"])
    assert vector[:5].tolist() == case["first"]
    masks.apply_mask(vector, key, -1)
    masks.reduce(vector, case["modulus_bits"])
    assert not vector.any()


@pytest.mark.parametrize("case", **named(MASKS["failures"]))
def test_agreements_refused(case):
    with refusal(case["error"]):
        keys.agree(bytes.fromhex(MASKS["private"]), bytes.fromhex(case["peer_public"]))


def layout() -> Layout:
    updates = tuple(msgspec.convert(port, Update) for port in FIXED["updates"])
    return Layout.of(Program(kind="finish", inputs=(), outputs=updates))


def arrays(values: dict) -> dict[str, np.ndarray]:
    return {name: np.asarray(value, np.float64) for name, value in values.items()}


def test_fixed_point():
    encoded = layout().encode(arrays(FIXED["arrays"]), modulus_bits=24, max_cohort=200)
    assert encoded.tolist() == FIXED["encoded"]
    assert pack(encoded, 24).hex() == FIXED["packed"]
    assert unpack(bytes.fromhex(FIXED["packed"]), layout().length, 24).tolist() == FIXED["encoded"]
    assert {str(n): layout().modulus_bits(n) for n in (1, 2, 256, 257, 4096)} == FIXED["modulus_bits"]
    decoded = layout().decode_sum(np.array(FIXED["sum_of_three"], np.uint32), cohort=3, modulus_bits=24)
    assert {name: array.tolist() for name, array in decoded.deltas.items()} == FIXED["decoded"]["deltas"]
    assert {name: array.tolist() for name, array in decoded.values.items()} == FIXED["decoded"]["values"]
    assert decoded.weight == FIXED["decoded"]["weight"]


@pytest.mark.parametrize("case", **named(FIXED["encode_failures"]))
def test_encodings_refused(case):
    with refusal(case["error"]):
        layout().encode(arrays(case["arrays"]), modulus_bits=case["modulus_bits"], max_cohort=case["max_cohort"])


@pytest.mark.parametrize("case", **named(FIXED["decode_failures"]))
def test_sums_refused(case):
    with refusal(case["error"]):
        layout().decode_sum(np.array(case["total"], np.uint32), cohort=case["cohort"], modulus_bits=24)


@pytest.mark.parametrize("case", **named(FIXED["unpack_failures"]))
def test_bytes_refused(case):
    with refusal(case["error"]):
        unpack(bytes.fromhex(case["packed"]), layout().length, case["modulus_bits"])


def plan() -> RoundPlan:
    return unseal("plan", read(ROUND["sealed_plan"], Sealed), bytes.fromhex(ROUND["server_key"]), RoundPlan)


def participant(device: dict) -> Participant:
    stream = memoryview(bytes.fromhex(device["randomness"]))

    def draw(count: int) -> bytes:
        nonlocal stream
        drawn, stream = bytes(stream[:count]), stream[count:]
        return drawn

    return Participant(
        plan(),
        plan_digest(read(ROUND["sealed_plan"], Sealed)),
        Ed25519PrivateKey.from_private_bytes(bytes.fromhex(device["identity_seed"])),
        read(device["chain"], Chain),
        bytes.fromhex(ROUND["enrolment_key"]),
        draw,
    )


STEPS = {"share": Cohort, "complain": Shares, "mask": Complaints, "confirm": Survivors, "unmask": Confirmations}


def replay(device: dict, until: str = "done", message: object = None) -> Participant:
    """The good steps of `device`, compared as they go; `message` in place of the good one at `until`."""
    acting = participant(device)
    sent = acting.advertise()
    assert sent.advertisement == read(device["advertisement"], Sealed)
    assert sent.envelope_keys.hex() == device["envelope_keys"]
    vector = np.array(device["vector"], np.uint32)
    good = {
        "share": {**ROUND["cohort"], "keys": device["cohort_keys"]}, "complain": device["inbox"],
        "mask": ROUND["complaints"], "confirm": ROUND["survivors"],
        "unmask": ROUND["confirmations"],
    }  # fmt: skip
    for step, kind in STEPS.items():
        received = read(message if step == until else good[step], kind)
        answer = acting.mask(vector, received) if step == "mask" else getattr(acting, step)(received)
        if step == "share":
            assert answer == read(device["shares"], Shares)
        elif step == "complain":
            assert answer == read(device["complaints"], Complaints)
        elif step == "mask":
            assert answer.tolist() == device["masked"]
        elif step == "confirm":
            sent = [c["confirmation"] for c in good["unmask"]["confirmations"] if c["device"] == acting.device_id]
            assert [answer] == [read(sealed, Sealed) for sealed in sent]
        else:
            assert answer == read(device["answer"], Unmasking)
    return acting


@pytest.mark.parametrize("index", range(5))
def test_round(index):
    replay(ROUND["devices"][index])


@pytest.mark.parametrize("case", **named(ROUND["device_failures"]))
@pytest.mark.sampled(every=6)
def test_messages_refused_by_a_device(case):
    with refusal(case["error"]):
        replay(ROUND["devices"][0], case["step"], case["message"])


def unmask(answers: dict) -> np.ndarray:
    return unmask_sum(
        np.array(ROUND["masked_sum"], np.uint32),
        plan=plan(),
        cohort=read(ROUND["cohort"], Cohort),
        sharers=[device["device_id"] for device in ROUND["devices"][:6]],
        survivors=ROUND["survivors"]["devices"],
        answers={device: read(answer, Unmasking) for device, answer in answers.items()},
    )


def test_sum():
    answers = {device["device_id"]: device["answer"] for device in ROUND["devices"][:5]}
    assert unmask(answers).tolist() == ROUND["sum"]


@pytest.mark.parametrize("case", **named(ROUND["server_failures"]))
def test_answers_refused_by_the_server(case):
    with refusal(case["error"]) as caught:
        unmask(case["answers"])
    assert list(getattr(caught.value, "devices", [])) == case["devices"]
