"""A bundle whose weights take more than memory: graphs, sizes and statistics of it, and two of them compared."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from onnx import TensorProto, helper

from archipel.bundle import open_bundle, write_weights
from archipel.bundle.weights import weights_layout
from archipel.compression.stored import read_program
from archipel.graph.flops import flops
from archipel.insight import read_bundle
from tests.support.real_graphs import Arrays, sign_cnn

SIDE = 4096
ALLOWANCE = 48 << 20
"""Bytes of private memory; the large tensor has 64 MiB."""
SIGNER = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
LOOK = """
import sys
from pathlib import Path
from archipel.bundle import open_bundle
from archipel.insight.comparing import compare_subjects
from archipel.insight.subjects import read_bundle
from archipel.lite_runtime.confinement.limiting import limit_memory
bundles = [open_bundle(path, [bytes.fromhex(sys.argv[1])], sys.argv[2]) for path in sys.argv[3:]]
limit_memory(int(ALLOWANCE))
one, two = (read_bundle(bundle, "it", programs=["predict"]) for bundle in bundles)
data = one.subject.graphs[0]
print(data.notes, sum(node.flops for node in data.nodes), data.memory.peak)
print([row.distance for row in compare_subjects(one, two, run=False).tensors if row.name == "large"])
""".replace("ALLOWANCE", str(ALLOWANCE))


def predicting(weights: bytes) -> bytes:
    """A graph that multiplies its input, made as wide, with the tensor `large` of the bundle's weights."""
    place = weights_layout(weights[: 1 << 20], len(weights))["large"]
    large = TensorProto(name="large", data_type=TensorProto.FLOAT, dims=place.shape, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "weights.safetensors"), ("offset", place.offset), ("length", place.nbytes)):
        large.external_data.add(key=key, value=str(value))
    numbers = {"pads": [0, 0, 0, SIDE - 100], "starts": [0], "ends": [5], "axes": [1]}
    small = [onnx.numpy_helper.from_array(np.array(value), name) for name, value in numbers.items()]
    nodes = [
        helper.make_node("Flatten", ["input"], ["flat"]),
        helper.make_node("Pad", ["flat", "pads"], ["wide"]),
        helper.make_node("MatMul", ["wide", "large"], ["product"], name="product"),
        helper.make_node("Slice", ["product", "starts", "ends", "axes"], ["output"]),
    ]
    ends = [
        helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 1, 10, 10]),
        helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", 5]),
    ]
    graph = helper.make_graph(nodes, "predict", ends[:1], ends[1:], [large, *small])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return bytes(made.SerializeToString())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two bundles whose tensor `large` is 0 everywhere, and 0.5 in its first row."""
    folder, found = tmp_path_factory.mktemp("large"), []
    for name, number in (("one", 0.0), ("two", 0.5)):
        kept: dict[str, bytes] = {}

        def grown(arrays: Arrays, number: float = number, kept: dict[str, bytes] = kept) -> Arrays:
            large = np.zeros((SIDE, SIDE), np.float32)
            large[0] = number
            made = {**arrays, "large": large}
            kept["graph"] = predicting(write_weights(made))
            return made

        sign_cnn(folder / "first", SIGNER, name, weights=grown)
        found.append(sign_cnn(folder, SIGNER, name, weights=grown, graphs={"predict": kept["graph"]}))
    return found


@pytest.mark.sampled(every=3)
def test_it_takes_no_memory_for_its_weights(files: list[Path], tmp_path: Path) -> None:
    key = SIGNER.public_key().public_bytes_raw().hex()
    done = subprocess.run(
        [sys.executable, "-c", LOOK, key, str(tmp_path), *map(str, files)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # The product for one example, and the widened input with what is multiplied, of four bytes a number.
    flops_and_peak, distances = done.stdout.splitlines()
    assert flops_and_peak == f"[] {2 * SIDE * SIDE} {2 * SIDE * 4}"
    assert distances == f"[{0.5 * SIDE**0.5}]"


@pytest.mark.sampled(every=3)
def test_the_graph_is_the_one_that_is_read_whole(files: list[Path], tmp_path: Path) -> None:
    bundle = open_bundle(files[0], [SIGNER.public_key().public_bytes_raw()], tmp_path)
    whole, mapped = read_program(bundle, "predict"), read_program(bundle, "predict", bundle.tensors)
    assert [node.op_type for node in mapped.ir.graph] == [node.op_type for node in whole.ir.graph]
    assert [value.name for value in mapped.ir.graph.inputs] == ["input"]
    assert set(mapped.ir.graph.initializers) == set(whole.ir.graph.initializers)
    shapes = [[str(value.shape) for node in each.ir.graph for value in node.outputs] for each in (whole, mapped)]
    assert shapes[0] == shapes[1]
    assert flops(mapped) == flops(whole)


@pytest.mark.sampled(every=3)
def test_other_weights_take_the_place_of_its_own(files: list[Path], tmp_path: Path) -> None:
    bundle = open_bundle(files[0], [SIGNER.public_key().public_bytes_raw()], tmp_path)
    other = {"4.weight": bundle.tensors["4.weight"] + 1, "large": np.ones((2, 2), np.float32)}
    opened = read_bundle(bundle, "it", programs=["predict"], weights=other)
    means = {row.name: row.statistics.mean for row in opened.subject.tensors}
    assert means["4.weight"] == pytest.approx(bundle.tensors["4.weight"].mean(dtype=np.float64) + 1)
    assert means["large"] == 0.0
    assert opened.subject.notes == ["1 tensors of the weights are not those of the bundle, and left out"]
