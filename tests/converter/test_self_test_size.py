"""Self-test vectors are in proportion to the bundle, and the bundle says what they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import numpy_helper, parser

from archipel import bundle as b
from archipel.converter import Signing, convert
from archipel.converter.self_test import SMALL_BYTES
from archipel.graph import Model
from archipel.lite_runtime import Runtime
from archipel.lite_runtime.self_test import run_self_test

KEY = b.generate_key()
WEIGHTS = 1_300_000  # bytes


def _model(side: int, batch: str = "n") -> Model:
    """Pictures [batch, 1, side, side] by their mean through a weight of WEIGHTS bytes."""
    width = WEIGHTS // 4
    text = f"""<ir_version: 10, opset_import: ["": 21]> g (float[{batch}, 1, {side}, {side}] x) => (float[{batch}, 1] y)
    <float[1, {width}] w, float[{width}, 1] v, int64[2] axes = {{2, 3}}>
    {{ m = ReduceMean <keepdims = 0> (x, axes) h = MatMul (m, w) y = MatMul (h, v) }}"""
    proto = parser.parse_model(text)
    weights = np.random.default_rng(0).standard_normal((1, width)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    proto.graph.initializer.append(numpy_helper.from_array(np.full((width, 1), 1 / width, np.float32), "v"))
    return Model.from_proto(proto)


def _size(bundle: b.Bundle) -> tuple[int, int]:
    """Bytes of the vectors and of everything else."""
    test = bundle.manifest.self_test
    sizes = {path.name: path.stat().st_size for path in bundle.folder.iterdir()}
    vectors = 0 if test is None else sizes.pop(test.file)
    return vectors, sum(sizes.values())


@pytest.mark.parametrize(("side", "examples"), [(28, 4), (250, 2), (500, 1)])
@pytest.mark.sampled(every=4)
def test_large_inputs_give_fewer_examples(side: int, examples: int, tmp_path: Path) -> None:
    bundle = convert(_model(side), tmp_path / "b", signing=Signing(KEY))
    vectors, rest = _size(bundle)
    assert examples * side * side * 4 < vectors < examples * side * side * 4 + 1000
    assert vectors <= max(SMALL_BYTES, rest / 4) or (examples == 1 and vectors <= rest)
    report = run_self_test(Runtime(bundle))
    assert (report.vectors, report.examples) == (True, examples)
    covered = f"{examples} example{'s' if examples > 1 else ''}"
    assert str(report).startswith(f"predict on {covered} of pseudo-random numbers, largest deviation: y")


@pytest.mark.parametrize("batch", ["n", "2"])
@pytest.mark.sampled(every=4)
def test_an_example_larger_than_the_bundle_gives_no_vectors(batch: str, tmp_path: Path) -> None:
    bundle = convert(_model(900, batch), tmp_path / "b", signing=Signing(KEY))
    assert bundle.manifest.self_test is None
    assert _size(bundle)[0] == 0
    assert "predict answers an example of zeros" in str(run_self_test(Runtime(bundle)))


def test_given_examples_are_kept(tmp_path: Path) -> None:
    x = np.random.default_rng(1).standard_normal((3, 1, 900, 900)).astype(np.float32)
    bundle = convert(_model(900), tmp_path / "b", signing=Signing(KEY), self_test={"x": x})
    report = run_self_test(Runtime(bundle))
    assert (report.vectors, report.examples, report.source) == (True, 1, "given")
    assert "predict on 1 example of the publisher" in str(report)
