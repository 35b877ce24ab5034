"""A second implementation, straight from the definitions, that must agree with the committed round.

Integers, hashlib and hmac; of the crypto package only AES (one block at a time) and AES-GCM.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

ROUND = json.loads((Path(__file__).parents[2] / "vectors" / "protocol" / "round.json").read_text())
PRIME = 2**256 + 297
FIELD = 2**255 - 19
BITS, THRESHOLD, LEAVES = 24, 4, 7


def x25519(scalar: bytes, point: bytes) -> bytes:
    """RFC 7748, section 5: the Montgomery ladder."""
    k = (int.from_bytes(scalar, "little") & ~7 & ~(128 << 248)) | (64 << 248)
    u = int.from_bytes(point, "little") % 2**255
    x2, z2, x3, z3, swap = 1, 0, u, 1, 0
    for t in reversed(range(255)):
        bit = k >> t & 1
        if swap ^ bit:
            x2, z2, x3, z3 = x3, z3, x2, z2
        swap = bit
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        x3, z3 = (d * a + c * b) ** 2 % FIELD, u * (d * a - c * b) ** 2 % FIELD
        e = a * a - b * b
        x2, z2 = a * a * b * b % FIELD, e * (a * a + 121665 * e) % FIELD
    if swap:
        x2, z2 = x3, z3
    return (x2 * pow(z2, FIELD - 2, FIELD) % FIELD).to_bytes(32, "little")


BASE = (9).to_bytes(32, "little")


def hkdf(secret: bytes, label: str, *public: bytes) -> bytes:
    """RFC 5869 with one block of output."""
    plan = ROUND["plan_digest"]
    round_id = json.loads(b64(ROUND["sealed_plan"]["body"]))["round_id"]
    salt = b"archipel/v1/secagg\0" + bytes.fromhex(round_id) + bytes.fromhex(plan)
    extracted = hmac.new(salt, secret, hashlib.sha256).digest()
    info = b"archipel/v1/" + label.encode() + b"\0" + b"".join(public)
    return hmac.new(extracted, info + b"\1", hashlib.sha256).digest()


def clamped(scalar: bytes) -> bytes:
    number = (int.from_bytes(scalar, "little") & ~7 & ~(128 << 248)) | (64 << 248)
    return number.to_bytes(32, "little")


def tree(leaves: list[bytes]) -> list[list[bytes]]:
    """All levels of the tree over eight leaves, of which the last is empty."""
    levels = [[hashlib.sha256(b"archipel/v1/envelope-leaf\0" + leaf).digest() for leaf in leaves] + [bytes(32)]]
    while len(levels[-1]) > 1:
        below = iter(levels[-1])
        pairs = zip(below, below)
        levels.append([hashlib.sha256(b"archipel/v1/envelope-node\0" + a + b).digest() for a, b in pairs])
    return levels


def path(levels: list[list[bytes]], place: int) -> bytes:
    """The sibling on each level: one's own number with the last bit the other way round."""
    return b"".join(levels[depth][place // 2**depth ^ 1] for depth in range(3))


def mask(key: bytes, length: int) -> list[int]:
    block = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    stream = b"".join(block.update(counter.to_bytes(16, "big")) for counter in range(length // 4 + 1))
    return [int.from_bytes(stream[4 * i : 4 * i + 4], "little") for i in range(length)]


def b64(text: str) -> bytes:
    return base64.b64decode(text)


def body(sealed: dict[str, str]) -> dict[str, object]:
    return json.loads(b64(sealed["body"]))


class Secrets:
    """What a device draws, cut from its stream in the order of the protocol."""

    def __init__(self, device: dict, peers: int) -> None:
        stream = bytes.fromhex(device["randomness"])
        self.cipher, self.mask, envelope, self.seed = (stream[32 * i : 32 * i + 32] for i in range(4))
        self.private = [
            clamped(hkdf(envelope, "envelope-private", place.to_bytes(4, "big"))) for place in range(LEAVES)
        ]
        numbers = [
            int.from_bytes(stream[128 + 64 * i : 192 + 64 * i], "big") % PRIME for i in range(2 * (THRESHOLD - 1))
        ]
        # Highest power first, then the secret itself.
        self.mask_polynomial = [*numbers[: THRESHOLD - 1], int.from_bytes(self.mask, "big")]
        self.seed_polynomial = [*numbers[THRESHOLD - 1 :], int.from_bytes(self.seed, "big")]
        rest = stream[128 + 64 * len(numbers) :]
        self.nonces = [rest[12 * i : 12 * i + 12] for i in range(peers)]
        assert len(rest) == 12 * peers


@pytest.mark.parametrize("name", sorted(device["device_id"] for device in ROUND["devices"]))
@pytest.mark.sampled(every=6)
def test_keys_that_are_handed_out(name):
    """To each device the key that each other one has for its place in the cohort."""
    place, told = ORDER.index(name), DEVICES[name]["cohort_keys"]
    assert [item["peer"] for item in told] == [peer for peer in ORDER if peer != name]
    for item in told:
        public = [x25519(private, BASE) for private in SECRETS[item["peer"]].private]
        assert b64(item["key"]) == public[place]
        assert b64(item["path"]) == path(tree(public), place)


def value(polynomial: list[int], x: int) -> bytes:
    degree = len(polynomial) - 1
    return (sum(c * x ** (degree - i) for i, c in enumerate(polynomial)) % PRIME).to_bytes(33, "big")


DEVICES = {device["device_id"]: device for device in ROUND["devices"]}
SECRETS = {name: Secrets(device, len(DEVICES) - 1) for name, device in DEVICES.items()}
ORDER = sorted(DEVICES)


@pytest.mark.parametrize("name", ORDER)
def test_advertised_keys(name):
    advertised = body(DEVICES[name]["advertisement"])
    assert b64(advertised["cipher_key"]) == x25519(SECRETS[name].cipher, BASE)
    assert b64(advertised["mask_key"]) == x25519(SECRETS[name].mask, BASE)
    public = [x25519(private, BASE) for private in SECRETS[name].private]
    assert b"".join(public).hex() == DEVICES[name]["envelope_keys"]
    assert b64(advertised["envelope_root"]) == tree(public)[-1][0]
    assert advertised["plan"] == hashlib.sha256(b64(ROUND["sealed_plan"]["body"])).hexdigest() == ROUND["plan_digest"]


@pytest.mark.parametrize("name", ORDER)
def test_signatures_and_ids(name):
    device = DEVICES[name]
    token, identity = device["chain"]["token"], device["chain"]["identity"]
    device_key = b64(body(identity)["device_key"])
    for label, sealed, key in (
        ("token", token, bytes.fromhex(ROUND["enrolment_key"])),
        ("identity", identity, b64(body(token)["token_key"])),
        ("advertisement", device["advertisement"], device_key),
        ("plan", ROUND["sealed_plan"], bytes.fromhex(ROUND["server_key"])),
    ):
        signed = b"archipel/v1/" + label.encode() + b"\0" + b64(sealed["body"])
        Ed25519PublicKey.from_public_bytes(key).verify(b64(sealed["signature"]), signed)
    assert name == hashlib.sha256(b"archipel/v1/device\0" + device_key).hexdigest()[:32]


ROTATION = json.loads((Path(__file__).parents[2] / "vectors" / "protocol" / "rotation.json").read_text())


def signed(label: str, sealed: dict[str, str], key: bytes) -> dict[str, object] | None:
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(
            b64(sealed["signature"]), b"archipel/v1/" + label.encode() + b"\0" + b64(sealed["body"])
        )
    except InvalidSignature:
        return None
    return body(sealed) if len(b64(sealed["body"])) <= 1024 else None


def newest_key(chain: dict) -> bytes | None:
    """The key at the end of the chain; None unless every link holds."""
    token = signed("token", chain["token"], bytes.fromhex(ROTATION["enrolment_key"]))
    first = token and signed("identity", chain["identity"], b64(token["token_key"]))
    if not first:
        return None
    keys = [b64(first["device_key"])]
    name = hashlib.sha256(b"archipel/v1/device\0" + keys[0]).hexdigest()[:32]
    for number, sealed in enumerate(chain.get("rotations", []), start=1):
        link = signed("rotation", sealed, keys[-1])
        if (
            not link
            or set(link) != {"device", "number", "device_key"}
            or (link["device"], link["number"]) != (name, number)
        ):
            return None
        keys.append(b64(link["device_key"]))
    return keys[-1] if len(set(keys)) == len(keys) <= 9 else None


@pytest.mark.parametrize("case", ROTATION["chains"], ids=lambda case: case["name"])
def test_rotated_chains(case):
    key = newest_key(case["chain"])
    assert (key and key.hex()) == case["key"]


@pytest.mark.parametrize("case", ROTATION["requests"], ids=lambda case: case["name"])
def test_rotation_requests(case):
    """The new link is the next, or the last one again; the new key signed its digest and this server's key."""
    sent, links = case["request"], case["chain"].get("rotations", [])
    number = body(sent["certificate"])["number"]
    key = None
    if number in (len(links), len(links) + 1):
        key = newest_key({**case["chain"], "rotations": [*links[: number - 1], sent["certificate"]]})
    proof = key and signed("rotated", sent["proof"], key)
    digest = hashlib.sha256(b64(sent["certificate"]["body"])).hexdigest()
    good = bool(proof) and (b64(proof["server_key"]).hex(), proof["certificate"]) == (ROTATION["server_key"], digest)
    assert (key.hex() if good and key else None) == case["key"]


def cohort_digest() -> str:
    rows = b"".join(
        bytes.fromhex(name) + hashlib.sha256(b64(DEVICES[name]["advertisement"]["body"])).digest() for name in ORDER
    )
    return hashlib.sha256(b"archipel/v1/cohort\0" + rows).hexdigest()


def test_digests():
    assert ROUND["cohort_digest"] == cohort_digest()
    survivors = ROUND["survivors"]["devices"]
    assert survivors == sorted(name for name in ORDER if DEVICES[name]["masked"] is not None)
    text = '{"devices":[' + ",".join(f'"{name}"' for name in survivors) + "]}"
    assert ROUND["survivors_digest"] == hashlib.sha256(text.encode()).hexdigest()
    complaints = json.dumps(ROUND["complaints"], sort_keys=True, separators=(",", ":"))
    assert ROUND["complaints_digest"] == hashlib.sha256(complaints.encode()).hexdigest()
    for item in ROUND["confirmations"]["confirmations"]:
        assert body(item["confirmation"]) == {
            "cohort": cohort_digest(),
            "complaints": ROUND["complaints_digest"],
            "plan": ROUND["plan_digest"],
            "round_id": body(ROUND["sealed_plan"])["round_id"],
            "survivors": ROUND["survivors_digest"],
        }


SPOILED = (ROUND["devices"][6]["device_id"], ROUND["devices"][0]["device_id"])


def opened(sender: str, recipient: str, private: bytes, ciphertext: bytes) -> bytes | None:
    """With the recipient's private key for this sender; None where it does not open."""
    cipher = b64(body(DEVICES[sender]["advertisement"])["cipher_key"])
    key = hkdf(x25519(private, cipher), "envelope", cipher, x25519(private, BASE))
    try:
        return AESGCM(key).decrypt(ciphertext[:12], ciphertext[12:], bound(sender, recipient))
    except InvalidTag:
        return None


def bound(sender: str, recipient: str) -> bytes:
    ids = body(ROUND["sealed_plan"])["round_id"] + cohort_digest() + sender + recipient
    return b"archipel/v1/envelope\0" + bytes.fromhex(ids)


def test_the_complaint():
    """The key in it is under the root that the complainer advertised, and the signed envelope does not open with it."""
    (found,) = ROUND["complaints"]["complaints"]
    assert (found["accused"], found["complainer"]) == SPOILED
    place, ciphertext = ORDER.index(found["accused"]), b64(found["ciphertext"])
    key = b64(body(DEVICES[found["accused"]]["chain"]["identity"])["device_key"])
    Ed25519PublicKey.from_public_bytes(key).verify(b64(found["signature"]), bound(*SPOILED) + ciphertext)
    assert b64(found["key"]) == SECRETS[found["complainer"]].private[place]
    public = [x25519(private, BASE) for private in SECRETS[found["complainer"]].private]
    assert b64(found["path"]) == path(tree(public), place)
    assert opened(*SPOILED, b64(found["key"]), ciphertext) is None
    others = [device for device in ROUND["devices"][:6] if device["device_id"] != found["complainer"]]
    assert all(device["complaints"] == {"complaints": []} for device in others)


@pytest.mark.parametrize("name", ORDER)
def test_envelopes(name):
    sent = {share["peer"]: b64(share["ciphertext"]) for share in DEVICES[name]["shares"]["shares"]}
    signatures = {share["peer"]: b64(share["signature"]) for share in DEVICES[name]["shares"]["shares"]}
    device_key = Ed25519PublicKey.from_public_bytes(b64(body(DEVICES[name]["chain"]["identity"])["device_key"]))
    peers = [peer for peer in ORDER if peer != name]
    assert sorted(sent) == peers
    mine = SECRETS[name]
    for nonce, peer in zip(mine.nonces, peers):
        device_key.verify(signatures[peer], bound(name, peer) + sent[peer])
        private = SECRETS[peer].private[ORDER.index(name)]
        if (name, peer) == SPOILED:
            assert opened(name, peer, private, sent[peer]) is None
            continue
        theirs = x25519(private, BASE)
        key = hkdf(x25519(mine.cipher, theirs), "envelope", x25519(mine.cipher, BASE), theirs)
        x = ORDER.index(peer) + 1
        shares = value(mine.mask_polynomial, x) + value(mine.seed_polynomial, x)
        assert sent[peer] == nonce + AESGCM(key).encrypt(nonce, shares, bound(name, peer))
        assert opened(name, peer, private, sent[peer]) == shares


@pytest.mark.parametrize("name", [name for name in ORDER if DEVICES[name]["masked"] is not None])
def test_masked_vectors(name):
    mine = SECRETS[name]
    public = x25519(mine.mask, BASE)
    result = list(DEVICES[name]["vector"])
    masks = [(1, mask(hkdf(mine.seed, "self-mask", public), len(result)))]
    for peer in ORDER:
        if peer not in (name, SPOILED[0]):
            theirs = x25519(SECRETS[peer].mask, BASE)
            key = hkdf(x25519(mine.mask, theirs), "pairwise-mask", *sorted([public, theirs]))
            masks.append((1 if name > peer else -1, mask(key, len(result))))
    for sign, entries in masks:
        result = [(a + sign * b) % 2**BITS for a, b in zip(result, entries)]
    assert result == DEVICES[name]["masked"]


def test_answers_and_sum():
    survivors = ROUND["survivors"]["devices"]
    for name in survivors:
        x = ORDER.index(name) + 1
        answer = DEVICES[name]["answer"]
        assert [share["device"] for share in answer["self_seeds"]] == survivors
        for share in answer["self_seeds"]:
            assert b64(share["share"]) == value(SECRETS[share["device"]].seed_polynomial, x)
        (dropped,) = answer["mask_keys"]
        assert dropped["device"] not in survivors
        assert b64(dropped["share"]) == value(SECRETS[dropped["device"]].mask_polynomial, x)
    columns = list(zip(*(DEVICES[name]["vector"] for name in survivors)))
    assert ROUND["sum"] == [sum(column) for column in columns]
    masked = list(zip(*(DEVICES[name]["masked"] for name in survivors)))
    assert ROUND["masked_sum"] == [sum(column) % 2**BITS for column in masked]
    assert ROUND["masked_sum"] != ROUND["sum"]


@pytest.mark.sampled(every=8)
def test_the_ladder_itself():
    # RFC 7748, section 5.2: one and a thousand iterations.
    k = u = BASE
    for iteration in range(1000):
        k, u = x25519(k, u), k
        if iteration == 0:
            assert k.hex() == "422c8e7a6227d7bca1350b3e2bb7279f7897b87bb6854b783c60e80311ae3079"
    assert k.hex() == "684cf59ba83309552800ef566f2f4d3c1c3887c49360e3875f2eb94d99532c51"
