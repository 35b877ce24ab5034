"""The choice of a variant: which one, and why, written by hand; latency measured on real bundles."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from archipel.bundle import Release, Variant, generate_key
from archipel.compression import DynamicInt8
from archipel.converter import Compression, Signing, convert, convert_variants
from archipel.errors import RuntimeInputError, RuntimeLimitError, SignatureError
from archipel.lite_runtime import choose, load
from archipel.lite_runtime.choice import OwnerLimits, measure_latency, pick


def variant(name: str, size: int, memory: int) -> Variant:
    return Variant(
        name=name, bytes=size, sha256=f"{size:064x}", digest=f"{memory:064x}", peak_bytes=memory, flops_per_example=10
    )


# The best one needs the most of everything, but of "int8", whose memory is above that of "float".
RELEASE = Release(
    format=1,
    name="digits",
    variants=(variant("float", 4000, 9000), variant("int8", 1000, 9500), variant("small", 600, 2000)),
)
SECONDS = {"float": 0.004, "int8": 0.0015, "small": 0.002}


@pytest.mark.parametrize(
    ("limits", "name", "measured"),
    [
        ({}, "float", []),
        ({"max_bytes": 4000}, "float", []),
        ({"max_bytes": 3999}, "int8", []),
        ({"max_bytes": 999}, "small", []),
        ({"max_memory": 9499}, "float", []),
        ({"max_memory": 8999}, "small", []),
        ({"max_bytes": 3999, "max_memory": 9499}, "small", []),
        ({"max_latency": 0.004}, "float", ["float"]),
        ({"max_latency": 0.003}, "int8", ["float", "int8"]),
        # Only what fits otherwise is measured: that takes the device's time.
        ({"max_latency": 0.003, "max_bytes": 999}, "small", ["small"]),
        ({"max_latency": 0.003, "max_memory": 9400}, "small", ["float", "small"]),
    ],
)
def test_the_first_variant_within_the_limits(limits: dict[str, float], name: str, measured: list[str]) -> None:
    asked: list[str] = []

    def measure(each: Variant) -> float:
        asked.append(each.name)
        return SECONDS[each.name]

    chosen, _ = pick(RELEASE, OwnerLimits(**limits), measure)  # type: ignore[arg-type]
    assert (chosen.name, asked) == (name, measured)


def test_it_says_which_and_why() -> None:
    def why(**limits: float) -> str:
        return pick(RELEASE, OwnerLimits(**limits), lambda each: SECONDS[each.name])[1]  # type: ignore[arg-type]

    assert why() == (
        "variant float of 'digits' (4,000 bytes, 9,000 bytes of memory): the best of 3, and no limit is given"
    )
    assert why(max_bytes=5000) == (
        "variant float of 'digits' (4,000 bytes, 9,000 bytes of memory): the best of 3, and it is within the limits "
        "(file of at most 5,000 bytes)"
    )
    assert why(max_bytes=3000, max_memory=9200, max_latency=0.003) == (
        "variant small of 'digits' (600 bytes, 2,000 bytes of memory, 2 ms a prediction): the best within the limits "
        "(file of at most 3,000 bytes, memory of at most 9,200 bytes, latency of at most 3 ms); not float: its file "
        "has 4,000 bytes; not int8: it needs 9,500 bytes of memory"
    )
    assert "latency of at most 12,000 ms" in why(max_latency=12)
    with pytest.raises(RuntimeLimitError) as refused:
        why(max_bytes=3000, max_memory=9200, max_latency=0.001)
    assert str(refused.value) == (
        "release 'digits': no variant fits the limits (file of at most 3,000 bytes, memory of at most 9,200 bytes, "
        "latency of at most 1 ms): float: its file has 4,000 bytes; int8: it needs 9,500 bytes of memory; small: a "
        "prediction takes 2 ms here; raise a limit, or ask the publisher for a smaller variant"
    )


@pytest.mark.parametrize("name", ["max_bytes", "max_memory", "max_latency"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_limits_that_are_none(name: str, value: float) -> None:
    with pytest.raises(RuntimeInputError, match=f"{name}: expected a number above 0, got {value}"):
        OwnerLimits(**{name: value})  # type: ignore[arg-type]


def test_a_latency_that_is_no_number_is_not_within_a_limit() -> None:
    with pytest.raises(RuntimeLimitError, match="float: a prediction takes nan ms here"):
        pick(RELEASE, OwnerLimits(max_latency=1.0), lambda each: float("nan"))


@pytest.mark.sampled(every=3)
def test_a_device_runs_what_it_chose(tmp_path: Path) -> None:
    """The better bundle's file is not fetched yet, and the limits say that it need not be."""
    key = generate_key()
    trusted = [key.public_key().public_bytes_raw()]
    rng = np.random.default_rng(0)
    # Wide enough that 8-bit weights make the smaller file.
    weights = {"first": (6, 256), "second": (256, 64)}
    first, second = (rng.standard_normal(shape).astype(np.float32) / shape[0] for shape in weights.values())
    graph = parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
    net (float[n, 6] x) => (float[n, 64] y) { h = MatMul(x, first) r = Relu(h) y = MatMul(r, second) }""")
    graph.graph.initializer.extend(numpy_helper.from_array(w, n) for w, n in zip((first, second), weights))
    onnx.save(graph, tmp_path / "net.onnx")
    made = convert_variants(
        tmp_path / "net.onnx", tmp_path / "net", signing=Signing(key),
        variants={"float": None, "dynamic": Compression([DynamicInt8()])},
    )  # fmt: skip
    best, smaller = made.release.variants
    assert (best.name, smaller.name) == ("float", "dynamic")
    assert smaller.bytes < best.bytes
    (tmp_path / "net" / "float.bundle").unlink()
    choice = choose(tmp_path / "net", trusted, max_bytes=smaller.bytes, max_latency=10.0, cache=tmp_path / "cache")
    assert choice.variant == smaller
    assert str(choice).startswith(f"variant dynamic of 'net' ({smaller.bytes:,} bytes, ")
    assert 0 < measure_latency(choice.bundle) < 10
    runtime = load(choice.bundle.folder, trusted)
    x = rng.standard_normal((4, 6)).astype(np.float32)
    assert runtime.predict(x) == pytest.approx(np.maximum(x @ first, 0) @ second, abs=0.01)
    with pytest.raises(RuntimeLimitError, match=r"float: its file has .*; dynamic: a prediction takes .* here"):
        choose(tmp_path / "net", trusted, max_bytes=smaller.bytes, max_latency=1e-9, cache=tmp_path / "cache")
    with pytest.raises(SignatureError, match="none of the 1 trusted keys signed this release"):
        choose(tmp_path / "net", [generate_key().public_key().public_bytes_raw()])


@pytest.mark.parametrize("vectors", [True, False])
def test_latency_of_free_dimensions_and_whole_numbers(tmp_path: Path, vectors: bool) -> None:
    """Of a bundle without self-test vectors, too, as an older one is."""
    key = generate_key()
    graph = """<ir_version: 10, opset_import: ["": 21]>
    predict (int64[n, length] ids) => (float[n, 2] y) <float[5, 2] table = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}> {
        rows = Gather(table, ids)
        axes = Constant <value_ints = [1]> ()
        y = ReduceSum <keepdims = 0> (rows, axes)
    }"""
    onnx.save(parser.parse_model(graph), tmp_path / "m.onnx")
    made = convert(
        tmp_path / "m.onnx", tmp_path / "m", signing=Signing(key),
        self_test={"ids": np.array([[0, 1, 4], [2, 2, 2]])} if vectors else None,
    )  # fmt: skip
    if not vectors:
        made.manifest = msgspec.structs.replace(made.manifest, self_test=None)
    assert 0 < measure_latency(made) < 10
