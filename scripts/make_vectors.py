"""Writes the protocol's test vectors: `python scripts/make_vectors.py [FOLDER]` (default: vectors/protocol).

Another implementation of the protocol (such as one in a browser) is right when it reproduces every case and refuses
every failure. Everything is derived from fixed strings; bytes are hexadecimal, messages are JSON as they travel.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from protocol_vectors.inputs import Json, Stream, fixed, flip, plain, signing_key
from protocol_vectors.neighbour_lies import neighbour_lies
from protocol_vectors.neighbour_parts import neighbour_parts
from protocol_vectors.neighbours import mlkem_round, neighbour_rounds
from protocol_vectors.rotation import rotation_vectors
from protocol_vectors.round import round_vectors
from protocol_vectors.steps import step_vectors
from protocol_vectors.trees import tree_vectors

from archipel.bundle.roles import Program, Update
from archipel.protocol import Layout, add_masked, issue_identity, mint_token, pack, public_bytes, seal
from archipel.protocol.messages import Chain, TokenCertificate
from archipel.protocol.secagg import keys, masks, shamir

FOLDER = Path(__file__).resolve().parent.parent / "vectors" / "protocol"


def identity_vectors() -> Json:
    enrolment, device = signing_key("enrolment"), signing_key("device 0")
    seed = fixed("token 0")
    token = mint_token(enrolment, population="pupils", not_after=2_000_000_000, seed=seed)
    chain = issue_identity(seed, token, public_bytes(device))
    other_seed = fixed("token 1")
    other_token = mint_token(enrolment, population="pupils", not_after=2_000_000_000, seed=other_seed)
    forged = mint_token(signing_key("somebody"), population="pupils", not_after=2_000_000_000, seed=seed)
    relabelled = seal("identity", msgspec.json.decode(token.body, type=TokenCertificate), enrolment)
    flipped = msgspec.structs.replace(chain.identity, signature=flip(chain.identity.signature))
    good: Json = {"population": "pupils", "now": 1_900_000_000}
    chains = [
        ("ok", chain, good, ""),
        ("expired_token", chain, {**good, "now": 2_000_000_001}, "CertificateError"),
        ("another_population", chain, {**good, "population": "staff"}, "CertificateError"),
        ("token_by_somebody_else", Chain(token=forged, identity=chain.identity), good, "CertificateError"),
        ("identity_by_another_token", Chain(token=other_token, identity=chain.identity), good, "CertificateError"),
        ("token_under_another_label", Chain(token=relabelled, identity=chain.identity), good, "CertificateError"),
        ("tampered_signature", Chain(token=token, identity=flipped), good, "CertificateError"),
        ("certificates_swapped", Chain(token=chain.identity, identity=token), good, "CertificateError"),
    ]
    return {
        "enrolment_seed": fixed("enrolment").hex(),
        "enrolment_key": public_bytes(enrolment).hex(),
        "token_seed": seed.hex(),
        "device_seed": fixed("device 0").hex(),
        "device_key": public_bytes(device).hex(),
        "device_id": hashlib.sha256(b"archipel/v1/device\0" + public_bytes(device)).hexdigest()[:32],
        "cases": [{"name": n, "chain": plain(c), **arguments, "error": e} for n, c, arguments, e in chains],
    }


def shamir_vectors() -> Json:
    secret, threshold, count = fixed("secret"), 3, 5
    shares = shamir.split(secret, threshold, count, Stream("coefficients"))
    points = list(enumerate(shares, start=1))
    beyond = shamir.PRIME.to_bytes(33, "big")
    cases = [
        ("first_three", points[:3], ""),
        ("last_three_reversed", points[:1:-1], ""),
        ("all_five", points, ""),
        ("too_few", points[:2], "ThresholdError"),
        ("position_twice", [points[0], points[0], points[1]], "ShareError"),
        ("position_zero", [(0, shares[0]), *points[1:3]], "ShareError"),
        ("wrong_surplus_share", [*points[:3], (4, shares[4])], "ShareError"),
        ("not_below_the_prime", [(1, beyond), *points[1:3]], "ShareError"),
        ("too_short", [(1, shares[0][1:]), *points[1:3]], "ShareError"),
        ("too_long", [(1, b"\0" + shares[0]), *points[1:3]], "ShareError"),
    ]
    return {
        "prime": str(shamir.PRIME),
        "secret": secret.hex(),
        "threshold": threshold,
        "randomness": fixed("coefficients", 64 * (threshold - 1)).hex(),
        "shares": [share.hex() for share in shares],
        "cases": [{"name": n, "points": [[x, y.hex()] for x, y in p], "error": e} for n, p, e in cases],
    }


def mask_vectors() -> Json:
    mine, yours = fixed("mask key 0"), fixed("mask key 1")
    public, peer = keys.public_key(mine), keys.public_key(yours)
    shared = keys.agree(mine, peer)
    round_id, digest = fixed("round", 16).hex(), fixed("plan").hex()
    salt = keys.round_salt(round_id, digest)
    derived = {
        "envelope": keys.envelope_key(shared, salt, public, peer),
        "pairwise-mask": keys.pairwise_mask_key(shared, salt, public, peer),
        "self-mask": keys.self_mask_key(fixed("seed"), salt, public),
    }
    expansions = []
    for length, bits in ((5, 32), (5, 24), (5, 9), (40_000, 24)):
        mask = np.zeros(length, np.uint32)
        masks.apply_mask(mask, derived["pairwise-mask"], 1)
        masks.reduce(mask, bits)
        digest_of_mask = hashlib.sha256(mask.astype("<u4").tobytes()).hexdigest()
        expansions.append(
            {"length": length, "modulus_bits": bits, "first": mask[:5].tolist(), "sha256": digest_of_mask}
        )
    return {
        "round_id": round_id,
        "plan_digest": digest,
        "private": mine.hex(),
        "public": public.hex(),
        "peer_private": yours.hex(),
        "peer_public": peer.hex(),
        "seed": fixed("seed").hex(),
        "shared": shared.hex(),
        "keys": {label: key.hex() for label, key in derived.items()},
        "expansions": expansions,
        "failures": [
            {"name": "peer_key_of_order_1", "peer_public": bytes(32).hex(), "error": "SecureAggregationError"},
            {"name": "peer_key_too_short", "peer_public": peer[1:].hex(), "error": "SecureAggregationError"},
        ],
    }


def fixed_point_vectors() -> Json:
    ports = [
        Update(
            name="dw", dtype="float32", shape=(2, 3), tensor="w", kind="delta", weighting="examples", range=2.0, bits=8
        ),
        Update(
            name="n", dtype="float32", shape=(), tensor="n", kind="weight", weighting="examples", range=100.0, bits=16
        ),
        Update(name="c", dtype="float32", shape=(2,), tensor="c", kind="value", weighting="uniform", range=0.5, bits=4),
    ]
    layout = Layout.of(Program(kind="finish", inputs=(), outputs=tuple(ports)))
    arrays = {"dw": [[0.0, -0.0, 2.0], [-2.0, 3.0, -1e30]], "n": 37.0, "c": [0.25, -0.06]}
    encoded = layout.encode(_arrays(arrays), modulus_bits=24, max_cohort=200)
    total = np.zeros(layout.length, np.uint32)
    for _ in range(3):
        add_masked(total, encoded, 24)
    decoded = layout.decode_sum(total, cohort=3, modulus_bits=24)
    packed = pack(encoded, 24)
    bad = [
        ("not_a_number", {**arrays, "n": "nan"}, 24, 200),
        ("infinite", {**arrays, "n": "inf"}, 24, 200),
        ("missing", {"dw": arrays["dw"], "n": 37.0}, 24, 200),
        ("unknown", {**arrays, "d": 0.0}, 24, 200),
        ("misshapen", {**arrays, "c": [0.25]}, 24, 200),
        ("modulus_too_small", arrays, 16, 2),
    ]
    return {
        "updates": [json.loads(msgspec.json.encode(port)) for port in ports],
        "modulus_bits": {str(n): layout.modulus_bits(n) for n in (1, 2, 256, 257, 4096)},
        "arrays": arrays,
        "encoded": encoded.tolist(),
        "packed": packed.hex(),
        "sum_of_three": total.tolist(),
        "decoded": {
            "deltas": {name: array.tolist() for name, array in decoded.deltas.items()},
            "values": {name: array.tolist() for name, array in decoded.values.items()},
            "weight": decoded.weight,
        },
        "encode_failures": [
            {"name": n, "arrays": a, "modulus_bits": b, "max_cohort": c, "error": "ProtocolError"} for n, a, b, c in bad
        ],
        "decode_failures": [
            {"name": "beyond_the_cohort", "total": [4 * 127, *[0] * 8], "cohort": 3, "error": "ProtocolError"},
            {"name": "one_entry_too_few", "total": [0] * 8, "cohort": 3, "error": "ProtocolError"},
        ],
        "unpack_failures": [
            {"name": "trailing_byte", "packed": packed.hex() + "00", "modulus_bits": 24, "error": "MessageError"},
            {"name": "one_byte_too_few", "packed": packed.hex()[:-2], "modulus_bits": 24, "error": "MessageError"},
            {"name": "entry_too_large", "packed": packed.hex(), "modulus_bits": 23, "error": "MessageError"},
        ],
    }


def _arrays(values: Json) -> dict[str, np.ndarray]:
    return {name: np.asarray(value, np.float64) for name, value in values.items()}


VECTORS: dict[str, Callable[[], Json]] = {
    "identity.json": identity_vectors,
    "shamir.json": shamir_vectors,
    "masks.json": mask_vectors,
    "fixed_point.json": fixed_point_vectors,
    "round.json": round_vectors,
    "rotation.json": rotation_vectors,
    "neighbours.json": neighbour_rounds,
    "neighbours_mlkem.json": mlkem_round,
    "neighbour_lies.json": neighbour_lies,
    "neighbour_parts.json": neighbour_parts,
    "steps.json": step_vectors,
    "trees.json": tree_vectors,
}


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in VECTORS.items():
        text = json.dumps(make(), indent=1, sort_keys=True) + "\n"
        (folder / name).write_text(text)
        print(f"{folder / name}: {len(text)} bytes")


if __name__ == "__main__":
    main()
