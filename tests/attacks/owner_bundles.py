"""Bundles of a publisher who wants to know single devices' examples: what each sends has a place of its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from onnx import parser

from archipel import bundle as b
from archipel.bundle import roles

WIDTH = 4
"""Numbers in one example."""

_LOOK = """<ir_version: 10, opset_import: ["": 21]>
look (float[n, 4] x{input}) => (float[{entries}] places) {{
    {choose}
    slots = Constant <value_ints = [{slots}]> ()
    wrapped = Mod(chosen, slots)
    values = Constant <value_floats = [0.0, 1.0]> ()
    row = OneHot(wrapped, slots, values)
    zero = Constant <value_ints = [0]> ()
    one = Constant <value_ints = [1]> ()
    example = Slice(x, zero, one)
    shape = Constant <value_ints = [{slots}, 1]> ()
    column = Reshape(row, shape)
    placed = MatMul(column, example)
    flat = Constant <value_ints = [{entries}]> ()
    places = Reshape(placed, flat)
}}"""
WAYS: Mapping[str, tuple[str, str, roles.Seed | roles.Noise | None]] = {
    # name: (one more input of the graph, how a slot is chosen, that input's port)
    "seed": (
        ", uint32 seed",
        "wide = Cast <to = 7> (seed) axes = Constant <value_ints = [0]> () chosen = Unsqueeze(wide, axes)",
        roles.Seed(name="seed", dtype="uint32", shape=()),
    ),
    "noise": (
        ", int64[1] noise",
        "chosen = Abs(noise)",
        roles.Noise(name="noise", dtype="int64", shape=(1,), distribution="discrete_gaussian", scale=1e6),
    ),
    "data": (
        "",
        "sum = ReduceSum <keepdims = 0> (x) factor = Constant <value_float = 7919.0> () large = Mul(sum, factor)"
        " whole = Cast <to = 7> (large) size = Abs(whole) axes = Constant <value_ints = [0]> ()"
        " chosen = Unsqueeze(size, axes)",
        None,
    ),
}


def slots_bundle(folder: Path, key: Ed25519PrivateKey, *, slots: int, way: str) -> Path:
    """An `analyze` program that puts a device's first example into one of so many slots of the vector that is summed.

    Signed without the publisher's tools, which would refuse it. Returns the folder.
    """
    more, choose, port = WAYS[way]
    text = _LOOK.format(input=more, entries=slots * WIDTH, slots=slots, choose=choose)
    x = roles.Example(name="x", dtype="float32", shape=("n", WIDTH))
    stand_in = roles.Noise(name="seed", dtype="uint32", shape=(), distribution="discrete_gaussian", scale=1.0)
    inputs = (x,) if port is None else (x, stand_in if way == "seed" else port)
    places = roles.Update(
        name="places", tensor="places", dtype="float32", shape=(slots * WIDTH,), kind="value", weighting="uniform",
        range=8.0, bits=20,
    )  # fmt: skip
    manifest = b.Manifest(
        format=b.FORMAT_VERSION,
        name="census",
        programs={"look": b.Program(kind="analyze", file="look.onnx", inputs=inputs, outputs=(places,))},
        parameters=(),
        limits=b.Limits(peak_bytes=1 << 20, flops_per_example=1, upload_bytes=slots * WIDTH * 4),
        privacy=b.PrivacyPolicy(modes=("secure",), min_cohort=3, threshold=0.6, max_clip=1.0, max_bits=20),
        files={},
    )
    return sign_raw(folder, key, manifest, {"look.onnx": parser.parse_model(text).SerializeToString()}, way == "seed")


def sign_raw(
    folder: Path, key: Ed25519PrivateKey, manifest: b.Manifest, graphs: Mapping[str, bytes], with_seed: bool
) -> Path:
    """Write and sign whatever the manifest says; with `with_seed` its stand-in of that name has the role `seed`."""
    contents = {**graphs, "weights.safetensors": b.write_weights({"unused": np.zeros(1, np.float32)})}
    document = json.loads(msgspec.json.encode(manifest))
    document["files"] = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    if with_seed:
        for program in document["programs"].values():
            for port in program["inputs"]:
                if port["name"] == "seed":
                    port.clear()
                    port.update(role="seed", name="seed", dtype="uint32", shape=[])
    signed = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    folder.mkdir()
    for name, data in {**contents, "manifest.json": signed, "manifest.sig": key.sign(signed)}.items():
        (folder / name).write_bytes(data)
    return folder
