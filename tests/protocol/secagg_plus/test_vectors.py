"""The committed vectors of rounds over neighbours: every case is reproduced, every lie refused by its name.

tests/protocol/test_vectors.py checks that the files are what their script makes.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel import errors
from archipel.bundle.manifest import PrivacyPolicy
from archipel.protocol.messages import Chain, RoundPlan
from archipel.protocol.policy import plan_digest
from archipel.protocol.revocations import Revoked
from archipel.protocol.sealed import Sealed, decode, unseal
from archipel.protocol.secagg_plus import kem
from archipel.protocol.secagg_plus.drawing import draw_neighbours
from archipel.protocol.secagg_plus.messages import (
    Inbox,
    Inclusions,
    Invitation,
    Neighbours,
    Packed,
    Partners,
    Question,
    pack,
    unpack,
)
from archipel.protocol.secagg_plus.participant import Participant
from archipel.protocol.secagg_plus.shares import commit, split
from archipel.protocol.secagg_plus.sizes import Assumptions, Sizes, check_sizes
from archipel.protocol.secagg_plus.terms import terms_of
from archipel.protocol.secagg_plus.tree import check_members, hash_member
from tests.support.ml_kem import ml_kem

FOLDER = Path(__file__).parents[3] / "vectors" / "protocol"
ROUNDS, MLKEM, LIES, PARTS = (
    json.loads((FOLDER / f"{name}.json").read_text())
    for name in ("neighbours", "neighbours_mlkem", "neighbour_lies", "neighbour_parts")
)
KINDS: dict[str, type[Packed]] = {
    "draw": Invitation, "deal": Neighbours, "receive": Inbox, "mask": Partners, "confirm": Question,
    "answer": Inclusions,
}  # fmt: skip


HONEST: dict[str, Any] = {"step": "done", "messages": {}}


def drawer(randomness: str) -> Any:
    left = {"bytes": bytes.fromhex(randomness)}

    def draw(count: int) -> bytes:
        drawn, left["bytes"] = left["bytes"][:count], left["bytes"][count:]
        return drawn

    return draw


def read(value: object, kind: Any) -> Any:
    return decode("vector", json.dumps(value).encode(), kind)


def participant(given: dict[str, Any], device: dict[str, Any], lie: dict[str, Any]) -> Participant:
    sealed = read(given["sealed_plan"], Sealed)
    plan = unseal("plan", sealed, bytes.fromhex(given["server_key"]), RoundPlan)
    fixed: dict[str, Any] = {"modes": ("secure",), "threshold": 0.6, "max_clip": 1.0, "max_bits": 16}
    assert plan_digest(sealed) == given["plan_digest"]
    terms = terms_of(plan, given["plan_digest"], PrivacyPolicy(**fixed, **given["policy"]))
    if "sizes" in lie:
        terms = replace(terms, sizes=Sizes(*lie["sizes"]))
    revoked = lie.get("revoked", {"devices": [], "tokens": []})
    return Participant(
        terms, Ed25519PrivateKey.from_private_bytes(bytes.fromhex(device["identity_seed"])),
        read(device["chain"], Chain), bytes.fromhex(given["enrolment_key"]), drawer(device["randomness"]),
        Revoked(frozenset(revoked["devices"]), frozenset(revoked["tokens"])),
    )  # fmt: skip


def replay(given: dict[str, Any], device: dict[str, Any], lie: dict[str, Any], begun: list[str]) -> None:
    """All steps of the device, compared as they go, up to the one of the lie; `begun` gets their names."""
    acting = participant(given, device, lie)
    assert acting.device_id == device["device_id"]
    assert acting.advertise().hex() == device["member"]

    def told(step: str) -> Any:
        if step == "deal" and "introduced" in lie:
            good, instead = unpack(bytes.fromhex(device["gets"]["deal"]), Neighbours), lie["introduced"]
            members = [*good.members]
            members[instead["index"]] = bytes.fromhex(instead["member"])
            return Neighbours(members=members, proof=bytes.fromhex(instead["proof"]))
        return unpack(bytes.fromhex(lie["messages"].get(step, device["gets"][step])), KINDS[step])

    for step in KINDS:
        if device["gets"][step] is None or (step == "mask" and device["masked"] is None):
            return
        begun.append(step)
        if step == "mask":
            # Also where the server lies about keys that the device has verified.
            masked = acting.mask(np.array(device["vector"], np.uint32), told("mask"))
            assert masked.tolist() == device["masked"]
            if step == lie["step"]:
                return
            continue
        messages = [told(step)]
        if step == "answer":
            question = lie["messages"].get("question", device["gets"]["confirm"])
            messages = [unpack(bytes.fromhex(question), Question), *messages]
        said = getattr(acting, step)(*messages)
        if lie is HONEST:
            assert pack(said).hex() == device["says"][step]
        if step == lie["step"]:
            return


@pytest.mark.parametrize(
    ("server", "index"), [(server, index) for server, given in ROUNDS.items() for index in range(len(given["devices"]))]
)
def test_a_device_says_what_it_said(server: str, index: int) -> None:
    begun: list[str] = []
    replay(ROUNDS[server], ROUNDS[server]["devices"][index], HONEST, begun)
    # The device that leaves gets no further than its refusals.
    assert begun == list(KINDS)[: 3 if ROUNDS[server]["devices"][index]["masked"] is None else 6]


@pytest.mark.parametrize("index", range(2))
def test_with_ml_kem_a_device_says_what_it_said(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = MLKEM["semi-honest"]
    device = given["devices"][index]
    draw = drawer(device["randomness"])
    monkeypatch.setattr(sys.modules[__name__], "drawer", lambda randomness: draw)
    # The library's encapsulation is given no randomness, so here a second implementation's is used.
    monkeypatch.setattr(kem, "encapsulate", lambda public: ml_kem.encapsulate(public, draw(32)))
    begun: list[str] = []
    replay(given, device, HONEST, begun)
    assert begun == list(KINDS)[: 3 if device["masked"] is None else 6]
    assert draw(1) == b""


@pytest.mark.parametrize("lie", LIES["failures"], ids=lambda lie: f"{lie['step']}-{lie['name']}")
def test_lies_are_refused(lie: dict[str, Any]) -> None:
    given, expected = ROUNDS["malicious"], getattr(errors, lie["error"])
    # Exactly this class: a ShareError is not good enough for a ConsistencyError.
    begun: list[str] = []
    with pytest.raises(expected, check=lambda error: type(error) is expected):
        replay(given, given["devices"][0], lie, begun)
    assert begun[-1] == lie["step"]


@pytest.mark.parametrize("case", LIES["accepted"], ids=lambda case: f"{case['step']}-{case['name']}")
def test_odd_spellings_are_accepted(case: dict[str, Any]) -> None:
    begun: list[str] = []
    replay(ROUNDS["malicious"], ROUNDS["malicious"]["devices"][0], case, begun)
    assert begun[-1] == case["step"]


@pytest.mark.parametrize("case", LIES["refused"], ids=lambda case: case["name"])
def test_bad_envelopes_are_named(case: dict[str, Any]) -> None:
    given = ROUNDS["malicious"]
    device = given["devices"][0]
    acting = participant(given, device, {})
    acting.advertise()
    acting.draw(unpack(bytes.fromhex(device["gets"]["draw"]), Invitation))
    acting.deal(unpack(bytes.fromhex(device["gets"]["deal"]), Neighbours))
    assert acting.receive(unpack(bytes.fromhex(case["inbox"]), Inbox)).dealers == case["refused"]


@pytest.mark.parametrize("case", PARTS["shares"], ids=lambda case: case["name"])
def test_shares(case: dict[str, Any]) -> None:
    shares = split(
        bytes.fromhex(case["secret"]), case["threshold"], case["holders"], drawer(case["randomness"])
    )  # fmt: skip
    assert [share.hex() for share in shares] == case["shares"]
    associated = bytes.fromhex(case["associated"])
    assert [commit(7, x, share, associated).hex() for x, share in enumerate(shares, 1)] == case["commitments"]


@pytest.mark.parametrize("case", PARTS["draws"], ids=lambda case: f"{case['count']} of {case['size']}")
def test_draws(case: dict[str, Any]) -> None:
    draw = drawer(case["randomness"])
    assert draw_neighbours(case["size"], case["own"], case["count"], draw) == case["places"]
    assert draw(1) == b""


@pytest.mark.parametrize("case", PARTS["trees"], ids=lambda case: f"{case['places']} of {case['size']}")
def test_trees(case: dict[str, Any]) -> None:
    members = (bytes.fromhex(member) for member in case["members"])
    leaves = {place: hash_member(member) for place, member in zip(case["places"], members, strict=True)}
    check_members(bytes.fromhex(case["root"]), case["size"], leaves, bytes.fromhex(case["proof"]))


@pytest.mark.sampled(every=3)
def test_sizes() -> None:
    """A device takes exactly these, and none that are less by one."""
    for case in PARTS["sizes"]:
        assumed = Assumptions(case["corrupt"], case["dropped"], case["server"], hidden=case["hidden"])
        cohort, neighbours, low, partners = (case[name] for name in ("cohort", "neighbours", "low", "partners"))
        if partners is not None and low <= neighbours:
            check_sizes(Sizes(neighbours, low, partners), cohort, assumed)
        for fewer in ((low - 1, partners or neighbours), (low, (partners or neighbours + 1) - 1)):
            with pytest.raises(errors.PolicyError):
                check_sizes(Sizes(neighbours, *fewer), cohort, assumed)
