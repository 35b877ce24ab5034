"""Enrolment tokens that were made offline and must not be used any more."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import msgspec
import pytest

from archipel.protocol import identity, messages
from tests.support.devices import Device
from tests.support.world import World


def revoke(world: World, headers: dict[str, str] | None = None, **body: Any) -> tuple[int, Any]:
    return world.operator("POST", "/v1/enrolment-tokens/revoke", body, headers)


def token_key(device: Device) -> bytes:
    return msgspec.json.decode(device.enrolment_token.certificate.body, type=messages.TokenCertificate).token_key


def limited(world: World, *populations: str) -> dict[str, str]:
    made = world.operator("POST", "/v1/tokens", {"name": "x", "role": "operator", "populations": list(populations)})[1]
    return {"Authorization": f"Bearer {made['token']}"}


@pytest.mark.parametrize("by", ["certificate", "key"])
def test_nobody_enrols_with_a_revoked_token(world: World, device: Device, by: str) -> None:
    key = token_key(device)
    sent = {"certificate": device.enrolment_token.certificate} if by == "certificate" else {"token_key": key}
    status, made = revoke(world, **sent)
    assert status == 200
    name = hashlib.sha256(b"archipel/v1/token-id\0" + key).hexdigest()[:32]
    assert made == {
        "token_id": name, "token_key": base64.b64encode(key).decode(), "revoked": world.clock.now,
        "population": "pupils" if by == "certificate" else None,
    }  # fmt: skip
    status, answer = device.ask_to_enrol()
    assert (status, answer["detail"]) == (403, "this enrolment token was revoked; ask for a new one")
    world.clock.now += 5
    assert revoke(world, **sent) == (200, made)
    assert world.operator("GET", "/v1/enrolment-tokens/revoked")[1] == {"items": [made], "next": None}
    noted = [each["action"] for each in world.operator("GET", "/v1/audit")[1]["items"]]
    assert noted == ["enrolment_token.revoke"]


def test_a_token_that_was_used_is_not_revoked_but_its_device(world: World, device: Device) -> None:
    device.ask_to_enrol()
    status, answer = revoke(world, certificate=device.enrolment_token.certificate)
    assert status == 409, answer
    assert answer["detail"] == f"the token was used by device {device.id}; revoke the device"
    assert device.ask_to_enrol()[0] == 200


def test_what_is_no_token(world: World, device: Device) -> None:
    certificate = device.enrolment_token.certificate
    foreign = identity.mint_token(world.keys.publisher, population="pupils", not_after=2**40, seed=b"s" * 32)
    for body in ({}, {"certificate": certificate, "token_key": b"k" * 32}, {"certificate": foreign}):
        status, answer = revoke(world, **body)
        assert status == 422, answer
    assert revoke(world, token_key=b"k" * 31)[0] == 400


def test_operators_revoke_tokens_of_their_populations(world: World, device: Device) -> None:
    staff, pupils = limited(world, "staff"), limited(world, "pupils")
    certificate = device.enrolment_token.certificate
    assert revoke(world, staff, certificate=certificate)[0] == 403
    assert revoke(world, pupils, token_key=token_key(device))[0] == 403  # whose it is cannot be told
    assert revoke(world, pupils, certificate=certificate)[0] == 200
    listed = "/v1/enrolment-tokens/revoked"
    assert world.operator("GET", listed, headers=staff)[1]["items"] == []
    assert len(world.operator("GET", listed, headers=pupils)[1]["items"]) == 1
