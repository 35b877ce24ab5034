"""Bundles that a publisher signed and no converter would have written: the attacker has the release key."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from onnx import TensorProto, helper

from archipel import bundle as b
from archipel.bundle.roles import Example, Update

SECRET = bytes(range(7, 7 + 64))
"""The 64 bytes of the device's key file, which no graph may see."""


def external(name: str, location: str, length: int = 64, dtype: int = TensorProto.UINT8) -> TensorProto:
    """A tensor of `length` bytes at the start of the file `location`."""
    tensor = TensorProto(name=name, data_type=dtype, dims=[length], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", "0"), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)
    return tensor


def upload(tensor: TensorProto, place: str = "initializer") -> onnx.ModelProto:
    """analyze: example x [n] -> u [64], the bytes of `tensor` as numbers. `place` says where the graph has it."""
    constant = helper.make_node("Constant", [], ["stolen"], value=tensor)
    nodes, functions, initializers = [constant], [], []
    opsets = [helper.make_opsetid("", 21)]
    match place:
        case "initializer":
            tensor.name = "stolen"
            nodes, initializers = [], [tensor]
        case "subgraph" | "initializer of a subgraph":
            made = [_value("stolen", TensorProto.UINT8, [64])]
            body = helper.make_graph([constant], "body", [], made)
            if place != "subgraph":
                tensor.name = "stolen"
                body = helper.make_graph([], "body", [], made, [tensor])
            yes = helper.make_tensor("yes", TensorProto.BOOL, [], [True])
            nodes = [
                helper.make_node("Constant", [], ["yes"], value=yes),
                helper.make_node("If", ["yes"], ["taken"], then_branch=body, else_branch=body),
                helper.make_node("Identity", ["taken"], ["stolen"]),
            ]
        case "function":
            functions = [helper.make_function("own", "Take", [], ["stolen"], [constant], opsets)]
            nodes, opsets = (
                [helper.make_node("Take", [], ["stolen"], domain="own")],
                [*opsets, helper.make_opsetid("own", 1)],
            )
    nodes.append(helper.make_node("Cast", ["stolen"], ["u"], to=TensorProto.FLOAT))
    graph = helper.make_graph(
        nodes, "look", [_value("x", TensorProto.FLOAT, ["n"])], [_value("u", TensorProto.FLOAT, [64])], initializers
    )
    return helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=10)


def signed(folder: Path, key: Ed25519PrivateKey, model: onnx.ModelProto, source: onnx.ModelProto | None = None) -> Path:
    """A bundle folder with `model` as its only program, digests and signature right; `source` is for export."""
    weights = b.write_weights({"w": np.zeros(64, np.uint8)})
    update = {"kind": "value", "weighting": "uniform", "range": 255.0, "bits": 16}
    look = b.Program(
        kind="analyze",
        file="look.onnx",
        inputs=(Example(name="x", dtype="float32", shape=("n",)),),
        outputs=(Update(name="u", tensor="u", dtype="float32", shape=(64,), **update),),
    )
    contents = {"look.onnx": model.SerializeToString(), b.WEIGHTS_FILE: weights}
    if source is not None:
        contents["source.onnx"] = source.SerializeToString()
    manifest = b.encode_manifest(
        b.Manifest(
            format=b.FORMAT_VERSION,
            name="survey",
            programs={"look": look},
            parameters=(),
            limits=b.Limits(peak_bytes=1 << 20, flops_per_example=1, upload_bytes=256),
            privacy=b.PrivacyPolicy(modes=("secure",), min_cohort=10, threshold=0.7, max_clip=1.0, max_bits=16),
            files={name: hashlib.sha256(data).hexdigest() for name, data in contents.items()},
            source="" if source is None else "source.onnx",
        )
    )
    folder.mkdir()
    for name, data in {**contents, "manifest.json": manifest, "manifest.sig": key.sign(manifest)}.items():
        (folder / name).write_bytes(data)
    return folder


def public(key: Ed25519PrivateKey) -> list[bytes]:
    return [key.public_key().public_bytes_raw()]


def device_key(folder: Path) -> Path:
    """The file that the attacker is after: only the device's user can read it, and that is who runs the graph."""
    path = folder / "device.key"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    return path


def _value(name: str, dtype: int, shape: Sequence[int | str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


Change = Callable[[onnx.ModelProto], None]
