from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel import bundle as b
from archipel.errors import ManifestError, RuntimeInputError, RuntimeProgramError, SelfTestError
from archipel.lite_runtime import Runtime, load
from archipel.lite_runtime.self_test import run_self_test
from tests.support.text_bundles import BundleMaker, Roles

W = np.array([[0.5, -1.0], [0.25, 2.0], [1.0, 0.0]], np.float32)
X = np.array([[1.0, 2.0, 3.0], [-1.0, 0.5, 0.0]], np.float32)
Y = (X.astype(np.float64) @ W.astype(np.float64)).astype(np.float32)
LINEAR = "predict (float[n, 3] x, float[3, 2] w) => (float[n, 2] y) { y = MatMul(x, w) }"

AddTest = Callable[..., Path]


@pytest.fixture
def linear(make_bundle: Callable[..., Path], r: type[Roles]) -> Callable[..., Path]:
    def make(graph: str = LINEAR) -> Path:
        meaning = {"x": r.example, "w": r.parameter("w"), "y": r.output}
        return make_bundle({"predict": ("predict", graph, meaning)}, {"w": W})

    return make


@pytest.fixture
def add_test(key: Ed25519PrivateKey, tmp_path: Path) -> AddTest:
    """A copy of a bundle folder, signed again, with these tensors as its self-test."""

    def add(
        folder: Path, tensors: Mapping[str, np.ndarray] | bytes, rtol: float = 1e-4, atol: float = 1e-5, name: str = "t"
    ) -> Path:
        old = b.open_bundle(folder, [key.public_key().public_bytes_raw()])
        manifest = old.manifest
        graphs = {program.file: (folder / program.file).read_bytes() for program in manifest.programs.values()}
        data = tensors if isinstance(tensors, bytes) else b.write_weights(tensors)
        b.write_bundle(
            tmp_path / name,
            name=manifest.name,
            programs=manifest.programs,
            graphs=graphs,
            weights=(folder / b.WEIGHTS_FILE).read_bytes(),
            parameters=manifest.parameters,
            limits=manifest.limits,
            privacy=manifest.privacy,
            key=key,
            self_test=(b.SelfTest(file="self_test.safetensors", rtol=rtol, atol=atol), data),
        )
        return tmp_path / name

    return add


@pytest.fixture
def trusted(key: Ed25519PrivateKey) -> list[bytes]:
    return [key.public_key().public_bytes_raw()]


def test_the_right_answers_pass(linear: Callable[..., Path], add_test: AddTest, trusted: list[bytes]) -> None:
    runtime = load(add_test(linear(), {"example/x": X, "output/y": Y}), trusted)
    report = run_self_test(runtime)
    assert report.vectors
    assert report.examples == 2
    assert 0 <= report.deviations["y"] < 1e-6
    assert "2 examples" in str(report)


def test_a_wrong_answer_is_named_with_place_size_and_tolerance(
    linear: Callable[..., Path], add_test: AddTest, trusted: list[bytes]
) -> None:
    expected = Y.copy()
    expected[1, 0] += 0.25
    expected[0, 1] += 0.125
    runtime = load(add_test(linear(), {"example/x": X, "output/y": expected}, rtol=0.01, atol=0.001), trusted)
    with pytest.raises(SelfTestError) as caught:
        run_self_test(runtime)
    # -1 * 0.5 + 0.5 * 0.25 = -0.375, which the vectors say is -0.125
    text = str(caught.value)
    assert "output 'y' deviates by up to 0.25; at [1, 0] it is -0.375, expected -0.125" in text
    assert "allowed deviation 0.00225 (atol 0.001, rtol 0.01); 2 of 4 values are wrong" in text


@pytest.mark.parametrize(("off", "passes"), [(0.0099, True), (0.0101, False)])
def test_the_tolerance_is_absolute_plus_relative(
    linear: Callable[..., Path], add_test: AddTest, trusted: list[bytes], off: float, passes: bool
) -> None:
    # Where 4.0 is expected: 0.002 + 0.002 * 4 = 0.01.
    expected = (np.array([[1, 2, 3]], np.float64) @ W).astype(np.float32)
    assert expected[0, 0] == 4.0
    runtime = load(add_test(linear(), {"example/x": X[:1], "output/y": expected}, rtol=0.002, atol=0.002), trusted)
    moved = _Answers(runtime, off)
    if passes:
        assert run_self_test(moved).deviations["y"] == pytest.approx(off, rel=1e-3)
    else:
        with pytest.raises(SelfTestError, match=r"at \[0, 0\]"):
            run_self_test(moved)


class _Answers:
    """A runtime on a machine that computes a little wrong."""

    def __init__(self, runtime: Runtime, off: float) -> None:
        self.bundle = runtime.bundle
        self.parameters = runtime.parameters
        self._runtime = runtime
        self._off = np.float32(off)

    def predict(self, x: dict[str, np.ndarray], /) -> dict[str, np.ndarray]:
        answers = {name: array.copy() for name, array in self._runtime.predict(x).items()}
        answers["y"][0, 0] += self._off
        return answers


@pytest.mark.parametrize(("dtype", "good", "wrong"), [("INT64", 2**60, 2**60 + 1), ("BOOL", 1, 0)])
def test_integers_and_truth_values(
    make_bundle: BundleMaker, add_test: AddTest, trusted: list[bytes], r: type[Roles], dtype: str, good: int, wrong: int
) -> None:
    name = {"INT64": "int64", "BOOL": "bool"}[dtype]
    graph = f"predict ({name}[n] x) => ({name}[n] y) {{ y = Identity(x) }}"
    folder = make_bundle({"predict": ("predict", graph, {"x": r.example, "y": r.output})}, {"w": W})
    x = np.array([good], name)
    run_self_test(load(add_test(folder, {"example/x": x, "output/y": x}, rtol=0.0, atol=0.0), trusted))
    other = {"example/x": x, "output/y": np.array([wrong], name)}
    with pytest.raises(SelfTestError, match="deviates by up to 1;"):
        run_self_test(load(add_test(folder, other, rtol=0.0, atol=0.5, name="u"), trusted))


@pytest.mark.parametrize(
    ("tensors", "error"),
    [
        ({"example/x": X}, "only one of the two has output/y"),
        ({"example/x": X, "output/y": Y, "output/z": Y}, "output/z"),
        ({"example/x": X, "output/y": Y, "label/y": Y}, "label/y"),
        ({"example/x": X.astype(np.float64), "output/y": Y}, r"float32\[n, 3\], got float64\[2, 3\]"),
        ({"example/x": X[:, :2].copy(), "output/y": Y}, "axis 1 differs"),
        ({"example/x": X, "output/y": Y[:1]}, r"n = 2 in 'x'"),
        ({"example/x": X[:0], "output/y": Y[:0]}, "holds no examples"),
        ({"example/x": X * np.float32(np.nan), "output/y": Y}, "example 'x' has values not finite"),
        ({"example/x": X, "output/y": Y * np.float32(np.inf)}, "output 'y' has values not finite"),
        (b"\xff" * 100, "header length"),
    ],
)
def test_vectors_that_do_not_fit_are_refused(
    linear: Callable[..., Path],
    add_test: AddTest,
    trusted: list[bytes],
    tensors: dict[str, np.ndarray] | bytes,
    error: str,
) -> None:
    with np.errstate(invalid="ignore"):
        runtime = load(add_test(linear(), tensors), trusted)
        with pytest.raises(SelfTestError, match=error):
            run_self_test(runtime)


def test_more_bytes_than_any_self_test_needs(
    linear: Callable[..., Path], add_test: AddTest, trusted: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("archipel.lite_runtime.self_test.MAX_SELF_TEST_BYTES", 64)
    runtime = load(add_test(linear(), {"example/x": X, "output/y": Y}), trusted)
    with pytest.raises(SelfTestError, match="expected from 8 to 64"):
        run_self_test(runtime)


def test_an_answer_that_is_not_finite_is_wrong(
    linear: Callable[..., Path], add_test: AddTest, trusted: list[bytes]
) -> None:
    graph = "predict (float[n, 3] x, float[3, 2] w) => (float[n, 2] y) { q = MatMul(x, w) \n y = Log(q) }"
    runtime = load(add_test(linear(graph), {"example/x": X, "output/y": Y}), trusted)
    with pytest.raises(SelfTestError, match=r"output 'y' .* not finite"):
        run_self_test(runtime)


def test_without_vectors_an_example_of_zeros_is_answered(linear: Callable[..., Path], trusted: list[bytes]) -> None:
    report = run_self_test(load(linear(), trusted))
    assert not report.vectors
    assert report.examples == 1
    assert "no vectors" in str(report)
    # The logarithm of zero is not finite.
    graph = "predict (float[n, 3] x, float[3, 2] w) => (float[n, 2] y) { q = MatMul(x, w) \n y = Log(q) }"
    with pytest.raises(SelfTestError, match="not finite"):
        run_self_test(load(linear(graph), trusted))


def test_zeros_of_a_free_size(make_bundle: BundleMaker, trusted: list[bytes], r: type[Roles]) -> None:
    graph = """predict (float[n, 1, t] x) => (float[n, 1, u] y) <float[1, 1, 3] k = {1, 1, 1}> { y = Conv(x, k) }"""
    folder = make_bundle({"predict": ("predict", graph, {"x": r.example, "y": r.output})}, {"w": W})
    assert run_self_test(load(folder, trusted)).examples == 1


def test_a_runtime_that_has_learned_is_refused(
    linear: Callable[..., Path], add_test: AddTest, trusted: list[bytes]
) -> None:
    runtime = load(add_test(linear(), {"example/x": X, "output/y": Y}), trusted)
    runtime.set_parameters({"w": W + 1})
    with pytest.raises(RuntimeInputError, match="parameter 'w' is not the published one"):
        run_self_test(runtime)
    runtime.reset("parameters")
    assert run_self_test(runtime).vectors


def test_a_bundle_without_predict_has_nothing_to_test(
    make_bundle: BundleMaker, add_test: AddTest, trusted: list[bytes], r: type[Roles]
) -> None:
    graph = "train (float[n] x) => (float y) { y = ReduceSum <keepdims = 0> (x) }"
    folder = make_bundle({"train": ("train", graph, {"x": r.example, "y": r.metric()})}, {"w": W})
    with pytest.raises(RuntimeProgramError, match="no predict program, so it cannot be tested"):
        run_self_test(load(folder, trusted))
    with pytest.raises(ManifestError, match="no predict program to test"):
        add_test(folder, {"example/x": X, "output/y": Y})
