"""Two models: differences that were made by hand, distances by NumPy, outputs by ONNX Runtime."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper as to
import onnxruntime
import pytest

from archipel.bundle import Bundle
from archipel.insight import activation_histograms, compare_subjects, measure_times, read_bundle, read_onnx


@pytest.fixture
def files(cnn: Bundle, tmp_path: Path) -> tuple[Path, Path]:
    """The graph that predicts, and the same with other weights, another attribute and a node more."""
    a = onnx.load(cnn.program_path("predict"))
    onnx.save(a, tmp_path / "a.onnx")
    b = copy.deepcopy(a)
    weight = next(tensor for tensor in b.graph.initializer if tensor.name == "4.weight")
    weight.CopyFrom(to.from_array(to.to_array(weight) + np.float32(0.01), "4.weight"))
    gemm = next(node for node in b.graph.node if node.op_type == "Gemm")
    gemm.output[0] = "before"
    next(attribute for attribute in gemm.attribute if attribute.name == "alpha").f = 2.0
    b.graph.node.append(onnx.helper.make_node("Identity", ["before"], ["output"], name="last"))
    onnx.save(b, tmp_path / "b.onnx")
    return tmp_path / "a.onnx", tmp_path / "b.onnx"


def test_what_differs(files: tuple[Path, Path]) -> None:
    a, b = (read_onnx(path) for path in files)
    x = np.random.default_rng(1).standard_normal((8, 1, 10, 10), np.float32)
    found = compare_subjects(a, b, {"input": x})
    assert found.same == 4
    assert [(change.kind, change.name) for change in found.nodes] == [("changed", "node_linear"), ("added", "last")]
    assert found.nodes[0].what == ["alpha: 1 became 2", "gives before, before output"]

    distances = {row.name: row for row in found.tensors}
    old, new = (subject.weights["4.weight"].astype(np.float64) for subject in (a, b))
    row = distances["4.weight"]
    assert row.distance == pytest.approx(np.sqrt(((old - new) ** 2).sum()))
    assert row.relative == pytest.approx(np.linalg.norm(old - new) / np.linalg.norm(old))
    assert row.largest == pytest.approx(0.01, rel=1e-5)
    assert distances["0.weight"].distance == 0

    answers = [onnxruntime.InferenceSession(path).run(["output"], {"input": x})[0] for path in files]
    output = next(row for row in found.outputs if row.output)
    difference = (answers[0] - answers[1]).astype(np.float64)
    assert output.largest == pytest.approx(np.abs(difference).max(), rel=1e-5)
    signal = (answers[0].astype(np.float64) ** 2).sum()
    assert output.snr_db == pytest.approx(10 * np.log10(signal / (difference**2).sum()), abs=1e-3)


def test_a_model_with_itself(cnn: Bundle) -> None:
    opened = read_bundle(cnn, "cnn", programs=["predict"])
    found = compare_subjects(opened, opened)
    assert (found.nodes, found.same) == ([], 5)
    assert all(row.distance == 0 for row in found.tensors)
    assert all(row.equal for row in found.outputs)
    assert "the same class for 100.00% of 64 examples" in found.notes


def test_activations_with_the_weights_of_each_round(cnn: Bundle) -> None:
    opened = read_bundle(cnn, "cnn", programs=["predict"])
    x = np.random.default_rng(1).standard_normal((5, 1, 10, 10), np.float32)
    zeros = {name: np.zeros_like(array) for name, array in cnn.tensors.items()}
    versions = [("now", dict(cnn.tensors)), ("zeros", zeros)]
    series = {each.name: each for each in activation_histograms(opened.graphs[0], versions, {"input": x})}
    session = onnxruntime.InferenceSession(cnn.program_path("predict"))
    answer = session.run(["output"], {"input": x})[0].astype(np.float64)
    now, zero = series["output"].steps
    assert (now.statistics.mean, now.statistics.low) == (
        pytest.approx(answer.mean(), rel=1e-4),
        pytest.approx(answer.min()),
    )
    assert (zero.statistics.low, zero.statistics.high, zero.statistics.zeros) == (0, 0, 1)
    assert set(series) >= {"conv2d", "relu", "max_pool2d", "output"}


@pytest.mark.sampled(every=6)
def test_times_are_measured_or_told(cnn: Bundle, files: tuple[Path, Path]) -> None:
    opened = read_bundle(cnn, "cnn", programs=["predict"])
    measure_times(opened.graphs[0], batch=2, runs=3)
    times = opened.subject.graphs[0].times
    assert times is not None
    assert times.runs == 3
    assert sum(kernel.share for kernel in times.kernels) == pytest.approx(1)
    gemm = next(kernel for kernel in times.kernels if kernel.op == "Gemm")
    assert opened.subject.graphs[0].nodes[gemm.node].op == "Gemm"
    endless = read_onnx(files[0])
    measure_times(endless.graphs[0], runs=3, seconds=0.01)
    assert endless.subject.graphs[0].times is None
    assert "took longer than 0.01 seconds" in endless.subject.graphs[0].notes[-1]
