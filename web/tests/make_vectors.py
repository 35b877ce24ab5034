"""Small vectors that the Python package and the browser library must agree on: python tests/make_vectors.py [FOLDER]

Writes vectors/*.json: data orders, noise samples, sums, and how numbers and texts look in canonical JSON.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from archipel.bundle.manifest import PrivacyPolicy, decode_manifest
from archipel.errors import ManifestError
from archipel.lite_runtime.noise import DiscreteGaussian
from archipel.lite_runtime.shuffle import batches, permutation

FOLDER = Path(__file__).with_name("vectors")


def byte_source(seed: str) -> Callable[[int], bytes]:
    """Bytes that both sides can make: SHA-256 of seed/0, seed/1, ..."""
    block = 0

    def read(count: int) -> bytes:
        nonlocal block
        out = b""
        while len(out) < count:
            out += hashlib.sha256(f"{seed}/{block}".encode()).digest()
            block += 1
        return out[:count]

    return read


def shuffles() -> list[dict[str, Any]]:
    cases = [(1, 0, 0, 0), (10, 0, 0, 0), (10, 0, 0, 1), (10, 0, 1, 0), (17, 1, 0, 0), (100, 2**32 - 1, 3, 7)]
    cases.append((1000, 123456789, 0, 2))
    found: list[dict[str, Any]] = [
        {"count": n, "seed": s, "phase": p, "epoch": e, "order": permutation(n, s, p, e).tolist()}
        for n, s, p, e in cases
    ]
    # Too long to write down: the digest of the order as little-endian uint32.
    for count in (100_000, 300_000):
        order = permutation(count, 5, 0, 0).astype("<u4")
        found.append(
            {"count": count, "seed": 5, "phase": 0, "epoch": 0, "sha256": hashlib.sha256(order.tobytes()).hexdigest()}
        )
    return found


def plans() -> list[dict[str, Any]]:
    found = []
    for plan in (
        {"count": 10, "batch_size": 4, "epochs": 2, "steps": None, "shuffle": True, "whole": False, "skip": 0},
        {"count": 10, "batch_size": 4, "epochs": 3, "steps": None, "shuffle": True, "whole": False, "skip": 4},
        {"count": 10, "batch_size": 4, "epochs": None, "steps": 7, "shuffle": True, "whole": True, "skip": 0},
        {"count": 10, "batch_size": 4, "epochs": None, "steps": 7, "shuffle": False, "whole": False, "skip": 5},
    ):
        made = batches(seed=9, phase=1, **plan)  # type: ignore[arg-type]
        found.append(
            {"plan": plan, "batches": [[batch.epoch, batch.indices.tolist(), batch.last_of_epoch] for batch in made]}
        )
    return found


def noise() -> list[dict[str, Any]]:
    return [
        {
            "sigma": sigma,
            "source": f"vector {sigma}",
            "samples": [str(value) for value in DiscreteGaussian(sigma, byte_source(f"vector {sigma}")).sample(120)],
        }
        for sigma in (0.3, 1.0, 2.5, 3.7, 100.0, 1e5)
    ]


def powers_of_ten(exponents: np.ndarray) -> np.ndarray:
    """As they are read from text: what NumPy makes of 10.0 ** x depends on the processor in its last bit."""
    return np.array([float(f"1e{exponent}") for exponent in exponents])


def numbers() -> list[dict[str, str]]:
    rng = np.random.default_rng(0)
    values = [0.0, -0.0, 1.0, -1.0, 0.1, 1e-4, 1e-5, 1.5e-5, 9.99e-6, 1e-6, 1e15, 1e16, 9999999999999998.0, 1e17]
    values += [1e21, 1e22, 1.234e22, 1e300, 5e-324, 2.0**53, 2.0**60, 0.67, 100.0, 12345.678, 1 / 3, -2.5e-9]
    values += [float(v) for v in np.frombuffer(rng.bytes(8 * 400), "<f8") if math.isfinite(v)]
    values += (rng.uniform(1, 10, 200) * powers_of_ten(rng.integers(-8, 18, 200))).tolist()
    return [{"bits": struct.pack(">d", v).hex(), "text": msgspec.json.encode(v).decode()} for v in values]


def texts() -> list[dict[str, str]]:
    values = ["", "plain", 'quote " and \\', "/", "\b\f\n\r\t\x00\x1f\x7f", "é\u2028\u2029", "\U0001f600", "\ufffd"]
    return [{"json": json.dumps(v), "canonical": msgspec.json.encode(v).decode()} for v in values]


def sums() -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    lists = [[], [0.1] * 10, [1e16, 1.0, -1e16], [1.0, 1e100, 1.0, -1e100], [1e-16, 1.0, 1e16]]
    lists += [(rng.standard_normal(50) * powers_of_ten(rng.integers(-12, 12, 50))).tolist() for _ in range(20)]
    return [{"values": values, "sum": math.fsum(values)} for values in lists]


def halves() -> list[list[int]]:
    bits = np.random.default_rng(2).integers(0, 2**32, 2000, dtype=np.uint64).astype(np.uint32)
    near = (np.arange(0x33000000, 0x47800000, 0x9F1A7, dtype=np.uint32), np.uint32([0, 1, 0x80000000, 0x7F800000]))
    values = np.concatenate([bits, *near]).view(np.float32)
    values = values[~np.isnan(values)]
    with np.errstate(over="ignore"):
        return [[int(a), int(b)] for a, b in zip(values.view(np.uint32), values.astype(np.float16).view(np.uint16))]


def defaults() -> list[dict[str, Any]]:
    """The fields of a policy that have a default, and whether a manifest that spells it out is taken."""
    with zipfile.ZipFile(FOLDER.parent / "fixtures" / "mlp.bundle") as archive:
        manifest = json.loads(archive.read("manifest.json"))
    made = []
    for field in msgspec.structs.fields(PrivacyPolicy):
        if field.default is not msgspec.NODEFAULT:
            spelt = manifest | {"privacy": manifest["privacy"] | {field.name: field.default}}
            text = msgspec.json.encode(spelt, order="sorted")
            try:
                decode_manifest(text)
                taken = True
            except ManifestError:
                taken = False
            spelling = msgspec.json.encode(field.default).decode()
            made.append({"field": field.name, "spelling": spelling, "taken": taken})
    return made


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(exist_ok=True)
    for name, made in {
        "shuffle": {"permutations": shuffles(), "batches": plans()},
        "noise": noise(),
        "canonical": {"numbers": numbers(), "texts": texts(), "defaults": defaults()},
        "arithmetic": {"sums": sums(), "halves": halves()},
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(made, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
