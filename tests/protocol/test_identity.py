from __future__ import annotations

import hashlib
from itertools import pairwise

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.errors import CertificateError, MessageError
from archipel.protocol import (
    EnrolmentToken,
    Sealed,
    decode,
    device_id,
    encode,
    enrolment_request,
    issue_identity,
    mint_token,
    public_bytes,
    seal,
    verify_chain,
    verify_enrolment,
)
from archipel.protocol.identity import extend_chain, rotation_request
from archipel.protocol.messages import (
    MAX_COHORT,
    MAX_ROTATIONS,
    Chain,
    EnrolmentProof,
    EnrolmentRequest,
    RotationCertificate,
    TokenCertificate,
)

NOT_AFTER = 2_000_000_000


@pytest.fixture
def token(signing_key, fixed) -> EnrolmentToken:
    enrolment = signing_key("enrolment")
    seed = fixed("token")
    return EnrolmentToken(
        server="https://example.org",
        server_key=public_bytes(signing_key("server")),
        enrolment_key=public_bytes(enrolment),
        publisher_keys=[public_bytes(signing_key("publisher"))],
        population="pupils",
        seed=seed,
        certificate=mint_token(enrolment, population="pupils", not_after=NOT_AFTER, seed=seed),
    )


def test_device_id():
    assert device_id(b"k" * 32) == hashlib.sha256(b"archipel/v1/device\0" + b"k" * 32).hexdigest()[:32]


def test_enrolment(token, signing_key):
    device = signing_key("device")
    request = decode("enrolment", encode(enrolment_request(token, device)), EnrolmentRequest)
    verified = verify_enrolment(request, token.enrolment_key, token.server_key, now=NOT_AFTER)
    assert verified.device_key == public_bytes(device)
    assert verified.device_id == device_id(verified.device_key)
    assert (verified.population, verified.kind) == ("pupils", "device")
    assert verify_chain(request.chain, token.enrolment_key, population="pupils") == verified


def test_the_token_file_survives_json_and_hides_its_seed(token):
    assert decode("token", encode(token), EnrolmentToken) == token
    assert repr(token.seed) not in repr(token)
    assert token.seed.hex() not in repr(token)


def test_expiry_is_checked_at_enrolment_only(token, signing_key):
    request = enrolment_request(token, signing_key("device"))
    with pytest.raises(CertificateError, match="expired"):
        verify_enrolment(request, token.enrolment_key, token.server_key, now=NOT_AFTER + 1)
    verify_chain(request.chain, token.enrolment_key)


def test_an_enrolment_is_for_one_server(token, signing_key):
    request = enrolment_request(token, signing_key("device"))
    with pytest.raises(CertificateError, match="meant for server"):
        verify_enrolment(request, token.enrolment_key, public_bytes(signing_key("other")), now=0)


def test_the_proof_needs_the_private_half(token, signing_key):
    request = enrolment_request(token, signing_key("device"))
    proof = seal("enrol", EnrolmentProof(server_key=token.server_key), signing_key("thief"))
    with pytest.raises(CertificateError, match="enrol"):
        verify_enrolment(msgspec.structs.replace(request, proof=proof), token.enrolment_key, token.server_key, now=0)


def test_a_signature_for_another_purpose_is_no_proof(token, signing_key):
    device = signing_key("device")
    request = enrolment_request(token, device)
    proof = seal("session", EnrolmentProof(server_key=token.server_key), device)
    with pytest.raises(CertificateError):
        verify_enrolment(msgspec.structs.replace(request, proof=proof), token.enrolment_key, token.server_key, now=0)


def test_the_server_cannot_mint(token, signing_key, fixed):
    server = signing_key("server")
    forged = mint_token(server, population="pupils", not_after=NOT_AFTER, seed=fixed("forged"))
    chain = issue_identity(fixed("forged"), forged, public_bytes(signing_key("device")))
    with pytest.raises(CertificateError, match="token"):
        verify_chain(chain, token.enrolment_key)


def test_a_certificate_of_the_wrong_shape(token, signing_key):
    enrolment = signing_key("enrolment")
    strange = seal("token", EnrolmentProof(server_key=token.server_key), enrolment)
    chain = issue_identity(token.seed, token.certificate, public_bytes(signing_key("device")))
    with pytest.raises(MessageError, match="token"):
        verify_chain(Chain(token=strange, identity=chain.identity), token.enrolment_key)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"seed": b"x" * 32}, "another token's key"),
        ({"population": "staff"}, "certified for population"),
        ({"enrolment_key": b"x" * 32}, "does not verify"),
    ],
)
def test_a_token_file_that_contradicts_itself(token, signing_key, change, why):
    with pytest.raises(CertificateError, match=why):
        enrolment_request(msgspec.structs.replace(token, **change), signing_key("device"))


def test_seeds_have_32_bytes(token, signing_key):
    with pytest.raises(CertificateError, match="32 bytes"):
        mint_token(signing_key("enrolment"), population="pupils", not_after=0, seed=b"short")


def test_aggregators_are_a_kind_of_their_own(token, signing_key, fixed):
    sealed = mint_token(
        signing_key("enrolment"), population="pupils", not_after=NOT_AFTER, seed=fixed("edge"), kind="aggregator"
    )
    assert msgspec.json.decode(sealed.body, type=TokenCertificate).kind == "aggregator"
    chain = issue_identity(fixed("edge"), sealed, public_bytes(signing_key("device")))
    assert verify_chain(chain, token.enrolment_key).kind == "aggregator"


def rotated(chain: Chain, keys: list, server_key: bytes = b"s" * 32) -> Chain:
    for old, new in pairwise(keys):
        chain = extend_chain(chain, rotation_request(chain, old, new, server_key).certificate)
    return chain


def test_a_device_enrols_with_its_first_key(token, signing_key):
    first, second = signing_key("device"), signing_key("next")
    chain = rotated(enrolment_request(token, first).chain, [first, second])
    proof = seal("enrol", EnrolmentProof(server_key=token.server_key), second)
    with pytest.raises(CertificateError, match="first key"):
        verify_enrolment(EnrolmentRequest(chain=chain, proof=proof), token.enrolment_key, token.server_key, now=0)


def test_a_key_is_replaced_a_bounded_number_of_times(token, signing_key):
    keys = [signing_key(f"key {number}") for number in range(MAX_ROTATIONS + 1)]
    chain = rotated(enrolment_request(token, keys[0]).chain, keys)
    assert verify_chain(chain, token.enrolment_key).rotations == MAX_ROTATIONS
    with pytest.raises(CertificateError, match="as often as it can be"):
        rotation_request(chain, keys[-1], signing_key("one more"), token.server_key)
    longer = extend_chain(chain, chain.rotations[-1])
    with pytest.raises(MessageError, match="rotations"):
        decode("chain", encode(longer), Chain)
    # A cohort of as many devices as there can be, all with the longest chains, is a message that devices take.
    assert MAX_COHORT * (len(encode(chain)) + 700) < 16 << 20


def test_a_chain_without_rotations_is_written_as_it_always_was(token, signing_key):
    chain = enrolment_request(token, signing_key("device")).chain
    assert set(msgspec.json.decode(encode(chain))) == {"token", "identity"}
    assert decode("chain", encode(chain), Chain) == chain


def test_links_are_small(token, signing_key):
    """Whoever pads them with blanks would make the message to all peers too large."""
    device = signing_key("device")
    chain = enrolment_request(token, device).chain
    body = chain.identity.body.ljust(5000)
    key = Ed25519PrivateKey.from_private_bytes(token.seed)
    padded = Sealed(body=body, signature=key.sign(b"archipel/v1/identity\0" + body))
    with pytest.raises(MessageError, match="5000 bytes, the limit is 1024"):
        verify_chain(msgspec.structs.replace(chain, identity=padded), token.enrolment_key)


def link(signer, of: str, number: int, to) -> Sealed:
    return seal("rotation", RotationCertificate(device=of, number=number, device_key=public_bytes(to)), signer)


@pytest.fixture
def links(token, signing_key):
    """A chain without rotations, its device's id, and the keys that it has one after the other."""
    keys = [signing_key(name) for name in ("device", "second", "third")]
    chain = issue_identity(token.seed, token.certificate, public_bytes(keys[0]))
    return chain, device_id(public_bytes(keys[0])), keys


def extended(chain: Chain, *rotations: Sealed) -> Chain:
    return msgspec.structs.replace(chain, rotations=list(rotations))


def test_the_id_stays_that_of_the_first_key_and_the_key_is_the_last(token, links):
    chain, name, (first, second, third) = links
    for rotations, key in (
        ((), first),
        ((link(first, name, 1, second),), second),
        ((link(first, name, 1, second), link(second, name, 2, third)), third),
    ):
        verified = verify_chain(extended(chain, *rotations), token.enrolment_key)
        assert (verified.device_id, verified.device_key) == (name, public_bytes(key))
        assert verified.rotations == len(rotations)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("of another device", "expected its rotation 1, got rotation 1 of"),
        ("left out", "expected its rotation 1, got rotation 2"),
        ("twice", "expected its rotation 2, got rotation 1"),
        ("back to the first", "goes back to a key"),
        ("to itself", "goes back to a key"),
        ("by the first key", "does not verify"),
        ("by a stranger", "does not verify"),
    ],
)
def test_rotations_that_do_not_follow(token, links, signing_key, what, words):
    chain, name, (first, second, third) = links
    once, other = link(first, name, 1, second), device_id(b"o" * 32)
    rotations = {
        "of another device": [link(first, other, 1, second)],
        "left out": [link(first, name, 2, third)],
        "twice": [once, link(second, name, 1, third)],
        "back to the first": [once, link(second, name, 2, first)],
        "to itself": [link(first, name, 1, first)],
        "by the first key": [once, link(first, name, 2, third)],
        "by a stranger": [link(signing_key("stranger"), name, 1, second)],
    }[what]
    with pytest.raises(CertificateError, match=words):
        verify_chain(extended(chain, *rotations), token.enrolment_key)


@pytest.mark.parametrize("known", [False, True])
def test_a_device_of_another_population(token, links, known):
    chain, _, _ = links
    kept = chain if known else None
    assert verify_chain(chain, token.enrolment_key, population="pupils", known=kept).population == "pupils"
    with pytest.raises(CertificateError, match="enrolled in population 'pupils', not in 'teachers'"):
        verify_chain(chain, token.enrolment_key, population="teachers", known=kept)


def test_a_known_chain_spares_the_signatures_of_no_other(token, links, signing_key):
    chain, name, (first, second, _) = links
    kept = decode("chain", encode(extended(chain, link(first, name, 1, second))), Chain)
    shown = decode("chain", encode(kept), Chain)
    assert verify_chain(shown, token.enrolment_key, known=kept) == verify_chain(shown, token.enrolment_key)
    # One bit of any signature, or a certificate that a stranger has made.
    stranger = signing_key("stranger")
    forged = mint_token(stranger, population="pupils", not_after=NOT_AFTER, seed=token.seed)
    flipped = {
        part: msgspec.structs.replace(sealed, signature=bytes([sealed.signature[0] ^ 1]) + sealed.signature[1:])
        for part, sealed in (("token", kept.token), ("identity", kept.identity), ("rotations", kept.rotations[0]))
    }
    for changed in (
        {"token": flipped["token"]}, {"identity": flipped["identity"]}, {"rotations": [flipped["rotations"]]},
        {"token": forged}, {"rotations": [link(stranger, name, 1, stranger)]},
    ):  # fmt: skip
        with pytest.raises(CertificateError, match="does not verify"):
            verify_chain(msgspec.structs.replace(shown, **changed), token.enrolment_key, known=kept)
    assert verify_chain(chain, token.enrolment_key, known=kept).device_key == public_bytes(first)


def test_the_last_second_of_a_token(token, links):
    chain, _, _ = links
    assert verify_chain(chain, token.enrolment_key, now=NOT_AFTER).population == "pupils"
    with pytest.raises(CertificateError, match="expired"):
        verify_chain(chain, token.enrolment_key, now=NOT_AFTER + 0.5)
