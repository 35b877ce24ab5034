"""Chains of devices that have replaced their key, and the requests that replace it: vectors/protocol/rotation.json."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.protocol import device_id, issue_identity, mint_token, public_bytes, seal
from archipel.protocol.identity import extend_chain, rotation_request
from archipel.protocol.messages import MAX_ROTATIONS, Chain, RotationCertificate, RotationProof, RotationRequest
from archipel.protocol.sealed import Sealed
from protocol_vectors.inputs import Json, fixed, flip, plain, signing_key

COUNT = MAX_ROTATIONS + 1
KEYS = [signing_key("device 0"), *(signing_key(f"device 0, key {number}") for number in range(1, COUNT + 1))]
SERVER = signing_key("server")


def first_chain(device: str = "device 0", token: str = "token 0") -> Chain:
    seed = fixed(token)
    certificate = mint_token(signing_key("enrolment"), population="pupils", not_after=2_000_000_000, seed=seed)
    return issue_identity(seed, certificate, public_bytes(signing_key(device)))


NAME = device_id(public_bytes(KEYS[0]))


def link(number: int, signer: int, key: int, **changes: Any) -> Sealed:
    fields = {"device": NAME, "number": number, "device_key": public_bytes(KEYS[key]), **changes}
    return seal("rotation", RotationCertificate(**fields), KEYS[signer])


def chain_of(*links: Sealed) -> Chain:
    chain = first_chain()
    for each in links:
        chain = extend_chain(chain, each)
    return chain


def rotation_vectors() -> Json:
    good = [link(number, number - 1, number) for number in range(1, MAX_ROTATIONS + 1)]
    once, twice = chain_of(good[0]), chain_of(*good[:2])
    other = first_chain("device 1", "token 1")
    tampered = msgspec.structs.replace(good[0], signature=flip(good[0].signature))
    padded = good[0].body.ljust(2000)
    blanks = Sealed(body=padded, signature=KEYS[0].sign(b"archipel/v1/rotation\0" + padded))
    chains = [
        ("once", once, 1, ""),
        ("twice", twice, 2, ""),
        ("as_often_as_possible", chain_of(*good), MAX_ROTATIONS, ""),
        ("signed_by_the_new_key", chain_of(link(1, 1, 1)), 0, "CertificateError"),
        ("signed_by_the_token", chain_of(_by_token()), 0, "CertificateError"),
        ("signed_by_a_key_that_was_replaced", chain_of(good[0], link(2, 0, 2)), 0, "CertificateError"),
        ("a_link_left_out", chain_of(good[1]), 0, "CertificateError"),
        ("links_swapped", chain_of(good[1], good[0]), 0, "CertificateError"),
        ("a_link_twice", chain_of(good[0], good[0]), 0, "CertificateError"),
        ("number_too_high", chain_of(link(2, 0, 1)), 0, "CertificateError"),
        ("number_again", chain_of(good[0], link(1, 1, 2)), 0, "CertificateError"),
        ("another_device", chain_of(link(1, 0, 1, device="0" * 32)), 0, "CertificateError"),
        ("back_to_the_first_key", chain_of(good[0], link(2, 1, 0)), 0, "CertificateError"),
        ("the_same_key_again", chain_of(good[0], link(2, 1, 1)), 0, "CertificateError"),
        ("joined_to_another_device", extend_chain(other, good[0]), 0, "CertificateError"),
        ("tampered_signature", chain_of(tampered), 0, "CertificateError"),
        ("another_label", chain_of(_relabelled()), 0, "CertificateError"),
        ("another_statement", chain_of(seal("rotation", _proof(good[0]), KEYS[0])), 0, "MessageError"),
        ("padded_with_blanks", chain_of(blanks), 0, "MessageError"),
    ]
    return {
        "enrolment_key": public_bytes(signing_key("enrolment")).hex(),
        "server_key": public_bytes(SERVER).hex(),
        "device_id": NAME,
        "key_seeds": [fixed("device 0").hex(), *(fixed(f"device 0, key {n}").hex() for n in range(1, COUNT + 1))],
        "chains": [
            {"name": n, "chain": plain(c), "key": public_bytes(KEYS[k]).hex() if not e else None, "error": e}
            for n, c, k, e in chains
        ],
        "requests": _requests(good),
    }


def _requests(good: list[Sealed]) -> list[Json]:
    server_key = public_bytes(SERVER)
    first, once, full = chain_of(), chain_of(good[0]), chain_of(*good)
    request = rotation_request(first, KEYS[0], KEYS[1], server_key)
    second = rotation_request(once, KEYS[1], KEYS[2], server_key)
    elsewhere = rotation_request(first, KEYS[0], KEYS[1], fixed("other server"))
    stolen = RotationRequest(certificate=good[0], proof=seal("rotated", _proof(good[0]), KEYS[0]))
    mixed = RotationRequest(certificate=link(1, 0, 2), proof=request.proof)
    forged = RotationRequest(certificate=link(1, 2, 1), proof=request.proof)
    another = _request(link(2, 0, 3), KEYS[3])
    cases = [
        ("first", first, request, 1, ""),
        ("first_once_more", once, request, 1, ""),
        ("second", once, second, 2, ""),
        ("too_late_for_the_first", chain_of(*good[:2]), request, 0, "CertificateError"),
        ("second_before_the_first", first, second, 0, "CertificateError"),
        ("last_once_more", full, _request(good[-1], KEYS[MAX_ROTATIONS]), MAX_ROTATIONS, ""),
        ("for_another_server", first, elsewhere, 0, "CertificateError"),
        ("without_the_new_key", first, stolen, 0, "CertificateError"),
        ("with_the_proof_of_another_key", first, mixed, 0, "CertificateError"),
        ("without_the_old_key", first, forged, 0, "CertificateError"),
        ("signed_by_a_key_that_was_replaced", once, another, 0, "CertificateError"),
    ]
    return [
        {
            "name": name, "chain": plain(chain), "request": plain(sent), "error": error,
            "key": None if error else public_bytes(KEYS[key]).hex(),
        }
        for name, chain, sent, key, error in cases
    ]  # fmt: skip


def _request(certificate: Sealed, key: Any) -> RotationRequest:
    return RotationRequest(certificate=certificate, proof=seal("rotated", _proof(certificate), key))


def _proof(certificate: Sealed) -> RotationProof:
    return RotationProof(server_key=public_bytes(SERVER), certificate=hashlib.sha256(certificate.body).hexdigest())


def _by_token() -> Sealed:
    statement = RotationCertificate(device=NAME, number=1, device_key=public_bytes(KEYS[1]))
    return seal("rotation", statement, Ed25519PrivateKey.from_private_bytes(fixed("token 0")))


def _relabelled() -> Sealed:
    statement = RotationCertificate(device=NAME, number=1, device_key=public_bytes(KEYS[1]))
    return seal("identity", statement, KEYS[0])
