"""A round that devices in TypeScript made (web/tests/device_round.test.ts): Python sends the same and finds the sum."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.bundle.roles import Program, Update
from archipel.protocol import Layout, Participant, decode, pack, plan_digest, unmask_sum, unseal
from archipel.protocol.messages import (
    Chain,
    Cohort,
    Complaints,
    Confirmations,
    RoundPlan,
    Shares,
    Survivors,
    Unmasking,
)
from archipel.protocol.narrow import pack_masked
from archipel.protocol.sealed import Sealed

FILE = Path(__file__).parents[2] / "vectors" / "browser" / "round.json"
ROUND: dict[str, Any] = json.loads(FILE.read_text())
PRESENT, SHARED = 5, 6


def read(value: object, kind: Any) -> Any:
    return decode("vector", json.dumps(value).encode(), kind)


def plan() -> RoundPlan:
    return unseal("plan", read(ROUND["sealed_plan"], Sealed), bytes.fromhex(ROUND["server_key"]), RoundPlan)


@pytest.mark.parametrize("index", range(SHARED))
def test_python_sends_what_the_browser_sent(index: int) -> None:
    device = ROUND["devices"][index]
    stream = SimpleNamespace(left=bytes.fromhex(device["randomness"]))

    def draw(count: int) -> bytes:
        drawn, stream.left = stream.left[:count], stream.left[count:]
        return drawn

    digest = plan_digest(read(ROUND["sealed_plan"], Sealed))
    assert digest == ROUND["plan_digest"]
    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(device["identity_seed"]))
    acting = Participant(plan(), digest, key, read(device["chain"], Chain), bytes.fromhex(ROUND["enrolment_key"]), draw)
    assert acting.device_id == device["device_id"]
    sent = acting.advertise()
    assert sent.advertisement == read(device["advertisement"], Sealed)
    assert sent.envelope_keys.hex() == device["envelope_keys"]
    cohort = read({**ROUND["cohort"], "keys": device["cohort_keys"]}, Cohort)
    shares = acting.share(cohort)
    # The last device has replaced one envelope, so the first six are as they were made.
    assert shares == read(device["shares"], Shares)
    assert acting.complain(read(device["inbox"], Shares)) == read(device["complaints"], Complaints)
    assert stream.left == b""
    if index >= PRESENT:
        return
    masked = acting.mask(np.array(device["vector"], np.uint32), read(ROUND["complaints"], Complaints))
    assert masked.tolist() == device["masked"]
    signed = acting.confirm(read(ROUND["survivors"], Survivors))
    confirmed = {each["device"]: each["confirmation"] for each in ROUND["confirmations"]["confirmations"]}
    assert signed == read(confirmed[acting.device_id], Sealed)
    assert acting.unmask(read(ROUND["confirmations"], Confirmations)) == read(device["answer"], Unmasking)


def test_the_first_complains_about_the_last() -> None:
    (complaint,) = read(ROUND["complaints"], Complaints).complaints
    assert (complaint.complainer, complaint.accused) == tuple(ROUND["devices"][i]["device_id"] for i in (0, -1))


def test_the_sum() -> None:
    present = ROUND["devices"][:PRESENT]
    total = unmask_sum(
        np.array(ROUND["masked_sum"], np.uint32),
        plan=plan(),
        cohort=read(ROUND["cohort"], Cohort),
        sharers=[device["device_id"] for device in ROUND["devices"][:SHARED]],
        survivors=ROUND["survivors"]["devices"],
        answers={device["device_id"]: read(device["answer"], Unmasking) for device in present},
    )
    assert total.tolist() == np.sum([device["vector"] for device in present], axis=0).tolist()


def test_the_bytes_of_a_vector() -> None:
    updates = tuple(msgspec.convert(port, Update) for port in ROUND["updates"])
    layout = Layout.of(Program(kind="finish", inputs=(), outputs=updates))
    masked = np.array(ROUND["devices"][0]["masked"], np.uint32)
    assert pack(masked, plan().modulus_bits).hex() == ROUND["packed"]
    narrow = msgspec.structs.replace(plan(), narrow=True)
    assert pack_masked(layout, masked, narrow).hex() == ROUND["packed_narrow"]
