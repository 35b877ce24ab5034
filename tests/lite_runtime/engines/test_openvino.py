"""OpenVINO as a delegate: what it answers and learns against ONNX Runtime, and what it must not take."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipel import bundle as b
from archipel import lite_runtime, models, training
from archipel.converter import Signing, Training, convert
from archipel.errors import DelegateError, IndexRangeError, RuntimeProgramError
from archipel.lite_runtime import Progress, Runtime
from archipel.lite_runtime.engines.openvino import import_openvino
from tests.support.text_bundles import BundleMaker, Roles

needs_openvino = pytest.mark.usefixtures("_openvino")
Loads = Callable[..., Runtime]
Arrays = dict[str, np.ndarray]


@pytest.fixture
def _openvino() -> None:
    if importlib.util.find_spec("openvino") is None:
        reason = "needs openvino; run pip install 'archipel[openvino]' (make test does)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Loads:
    """(network, delegates): its bundle, which learns by SGD with momentum, on these delegates."""
    folder, signer = tmp_path_factory.mktemp("openvino"), b.generate_key()
    networks: dict[str, tuple[Callable[[], Any], np.ndarray, dict[str, Any]]] = {
        "digits": (lambda: models.digits_cnn(0), np.zeros((2, 1, 28, 28), np.float32), {}),
        "functions": (lambda: models.digits_cnn(0), np.zeros((2, 1, 28, 28), np.float32), {}),
        "text": (
            lambda: models.transformer(0, length=12, width=16, dropout=0.0), np.zeros((2, 12), np.int64), {"axis": -1}
        ),
        "dropout": (
            lambda: models.transformer(0, length=12, width=16, dropout=0.5), np.zeros((2, 12), np.int64), {"axis": -1}
        ),
    }  # fmt: skip

    def load(name: str, delegates: Any, **more: Any) -> Any:
        path = folder / f"{name}.bundle"
        if not path.exists():
            make, example, loss = networks[name]
            options = {"step_options": {"kernels": name == "functions"}}
            learning = Training(training.losses.cross_entropy(**loss), training.optimizers.sgd(momentum=0.9), **options)
            convert(make().eval(), path, example=example, training=learning, signing=Signing(signer))
        trusted = [signer.public_key().public_bytes_raw()]
        return lite_runtime.load(path, trusted, delegates=delegates, cache=folder / "cache", **more)

    return load


def made(maker: BundleMaker, programs: Any, parameters: Arrays, delegates: Any) -> Runtime:
    folder = maker(programs, parameters)
    return Runtime(b.open_bundle(folder, [maker.key.public_key().public_bytes_raw()]), delegates=delegates)


def data(name: str, count: int = 40) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    if name == "digits":
        return rng.standard_normal((count, 1, 28, 28), np.float32), rng.integers(0, 10, count)
    return rng.integers(0, 80, (count, 12)), rng.integers(0, 80, (count, 12))


@needs_openvino
@pytest.mark.parametrize("name", ["digits", "text"])
@pytest.mark.sampled(every=8)
def test_it_predicts_and_learns_as_onnx_runtime_does(load: Loads, name: str) -> None:
    x, y = data(name)
    expected, found = load(name, "cpu"), load(name, "openvino")
    answers: list[list[np.ndarray]] = []
    for runtime in (expected, found):
        # Batches of 12 and a last one of 4, 20 steps; then one, two and 40 examples.
        history = runtime.fit(x, y, epochs=5, batch_size=12, seed=3, hyperparameters={"lr": 0.02}, validation=(x, y))
        assert len(history.losses) == 20
        assert min(history.losses[12:]) < history.losses[0]
        answers.append([np.array(history.losses), *(runtime.predict(x[:n]) for n in (1, 2, 40, 1))])
    for first, second in zip(*answers):
        np.testing.assert_allclose(second, first, rtol=1e-4, atol=1e-4)
    report = found.delegate_report()
    assert {each.delegates for each in report.programs.values()} == {("openvino",)}
    assert report.skipped == ()


@needs_openvino
@pytest.mark.sampled(every=8)
def test_an_interrupted_fit_ends_bit_for_bit_where_an_uninterrupted_one_ends(load: Loads, tmp_path: Path) -> None:
    x, y = data("digits")
    options: dict[str, Any] = {"epochs": 2, "batch_size": 12, "seed": 1, "checkpoint_every": 0.0}
    whole = load("digits", "openvino")
    whole.fit(x, y, **options, checkpoint=tmp_path / "whole")

    def stop(progress: Progress) -> None:
        if progress.step == 2:
            raise KeyboardInterrupt

    half = load("digits", "openvino")
    with pytest.raises(KeyboardInterrupt):
        half.fit(x, y, **options, checkpoint=tmp_path / "half", callbacks=[stop])
    resumed = load("digits", "openvino")
    assert resumed.fit(x, y, **options, checkpoint=tmp_path / "half").steps == 8
    for name, array in whole.parameters().items():
        assert array.tobytes() == resumed.parameters()[name].tobytes()


@needs_openvino
@pytest.mark.sampled(every=4)
def test_a_program_that_it_would_compute_otherwise_goes_to_onnx_runtime(load: Loads) -> None:
    x, y = data("dropout")
    expected = load("dropout", "cpu").fit(x, y, batch_size=20).losses
    runtime = load("dropout", ["openvino", "cpu"])
    assert runtime.fit(x, y, batch_size=20).losses == expected
    runtime.predict(x)
    report = runtime.delegate_report()
    assert report.programs["train"].delegates == ("cpu",)
    assert report.programs["predict"].delegates == ("openvino",)
    [skipped] = report.skipped
    assert (skipped.delegate, skipped.program) == ("openvino", "train")
    # The random numbers of dropout, for which there are no unsigned integers.
    assert "computes uint32 in int32" in skipped.reason
    with pytest.raises(DelegateError, match="'train' cannot be run by the delegates alone: openvino: it computes"):
        load("dropout", "openvino").fit(x, y)


@needs_openvino
def test_an_operator_that_it_lacks_is_named(make_bundle: BundleMaker, r: type[Roles]) -> None:
    graph = """predict (float[n, 3] x, float[3] w) => (float[n, 3] y) {
        zero = Constant <value_floats = [0.0, 0.0, 0.0]> ()
        s, y = Scan <num_scan_inputs = 1, body = b (float[3] a, float[3] row) => (float[3] c, float[3] d)
            { c = Add(a, row) \n t = Mul(row, w) \n d = Add(t, a) }> (zero, x)
    }"""
    programs = {"predict": ("predict", graph, {"x": r.example, "w": r.parameter("w"), "y": r.output})}
    runtime = made(make_bundle, programs, {"w": np.ones(3, np.float32)}, ["openvino", "cpu"])
    np.testing.assert_allclose(runtime.predict(np.ones((2, 3), np.float32)), [[1, 1, 1], [2, 2, 2]])
    [skipped] = runtime.delegate_report().skipped
    assert re.match("it cannot convert Scan: ", skipped.reason)


@needs_openvino
@pytest.mark.sampled(every=4)
def test_functions_that_it_does_not_look_into_are_named(load: Loads) -> None:
    runtime = load("functions", ["openvino", "cpu"])
    runtime.fit(*data("digits", 8))
    report = runtime.delegate_report()
    assert report.programs["train"].delegates == ("cpu",)
    [reason] = [skipped.reason for skipped in report.skipped if skipped.delegate == "openvino"]
    assert reason.startswith("it has no archipel.kernels.Conv, archipel.kernels.ConvGrad")


@needs_openvino
@pytest.mark.parametrize("label", [10, -1, 10**6])
@pytest.mark.sampled(every=4)
def test_labels_that_the_model_does_not_have_change_nothing(load: Loads, label: int) -> None:
    x, y = data("digits", 8)
    y[5] = label
    runtime = load("digits", "openvino")
    before = {name: array.copy() for name, array in runtime.parameters().items()}
    with pytest.raises(IndexRangeError, match=r"label.*5"):
        runtime.fit(x, y)
    for name, array in runtime.parameters().items():
        np.testing.assert_array_equal(array, before[name])


@needs_openvino
@pytest.mark.sampled(every=4)
def test_it_works_in_a_confined_process(load: Loads) -> None:
    x, y = data("digits")
    expected = load("digits", "openvino").fit(x, y, epochs=2, batch_size=12).losses
    with load("digits", "openvino", isolated=True, memory_limit=64 << 20) as runtime:
        assert runtime.fit(x, y, epochs=2, batch_size=12).losses == expected
        assert runtime.predict(x[:3]).shape == (3, 10)


@pytest.mark.sampled(every=3)
@needs_openvino
def test_it_leaves_no_trace_in_the_home_folder(tmp_path: Path) -> None:
    code = (
        "import sys, archipel.lite_runtime.engines.openvino as o; o.import_openvino()\n"
        "print([m for m in sys.modules if m.startswith('openvino_telemetry')])"
    )
    environment = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert list(tmp_path.iterdir()) == []


@needs_openvino
def test_profiles_are_of_onnx_runtime_alone(load: Loads) -> None:
    with pytest.raises(RuntimeProgramError, match=r"'predict' is run by openvino.*delegates='cpu'"):
        load("digits", "openvino").profile(data("digits")[0])


def test_without_the_package_the_error_says_how_to_install_it(
    make_bundle: BundleMaker, r: type[Roles], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("archipel.engine_registry.find_spec", lambda name: None)
    graph = "predict (float[n, 3] x) => (float[n, 3] y) { y = Relu(x) }"
    programs = {"predict": ("predict", graph, {"x": r.example, "y": r.output})}
    with pytest.raises(DelegateError, match=r"'openvino'.*pip install 'archipel\[openvino\]', or add 'cpu'"):
        made(make_bundle, programs, {}, "openvino")
    runtime = made(make_bundle, programs, {}, ["openvino", "cpu"])
    runtime.predict(np.ones((1, 3), np.float32))
    assert "pip install 'archipel[openvino]'" in runtime.delegate_report().table()


@needs_openvino
@pytest.mark.parametrize(
    ("options", "text"),
    [({"device": "XYZ"}, "device 'XYZ': .*not registered"), ({"NO_PROPERTY": "1"}, "device 'CPU': .*NO_PROPERTY")],
)
def test_a_device_or_a_property_that_is_not_there(load: Loads, options: dict[str, str], text: str) -> None:
    x, y = data("digits")
    with pytest.raises(DelegateError, match=f"{text}.*; add 'cpu'"):
        load("digits", [("openvino", options)]).predict(x)
    runtime = load("digits", [("openvino", options), "cpu"])
    np.testing.assert_array_equal(runtime.predict(x), load("digits", "cpu").predict(x))
    runtime.fit(x, y, batch_size=20)
    assert re.search(f"train: not on openvino: {text}", runtime.delegate_report().table())


@needs_openvino
def test_a_broken_package_is_left_out(load: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    x, _ = data("digits")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "openvino.utils", None)
        import_openvino.cache_clear()
        runtime = load("digits", ["openvino", "cpu"])
        runtime.predict(x)
        assert "not on openvino: the package cannot be imported: " in runtime.delegate_report().table()
    import_openvino.cache_clear()
    runtime = load("digits", ["openvino", "cpu"])
    runtime.predict(x)
    assert runtime.delegate_report().programs["predict"].delegates == ("openvino",)


@needs_openvino
def test_no_examples_are_a_clear_error(load: Loads) -> None:
    x, _ = data("digits")
    with pytest.raises(RuntimeProgramError, match=r"'input' has no elements \(shape \[0, 1, 28, 28\]\).*at least one"):
        load("digits", "openvino").predict(x[:0])


@needs_openvino
@pytest.mark.parametrize("fastest", ["openvino", "cpu"])
@pytest.mark.sampled(every=4)
def test_the_fastest_is_found_by_measurement_and_remembered(
    load: Loads, monkeypatch: pytest.MonkeyPatch, fastest: str
) -> None:
    measured: list[set[str]] = []

    def measure(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
        measured.append(set(calls))
        return {name: 0.001 if name == fastest else 0.002 for name in calls}

    monkeypatch.setattr("archipel.lite_runtime.engines.fastest.measure", measure)
    monkeypatch.setattr("archipel.lite_runtime.engines.sessions._FASTEST", {})
    x, y = data("digits")
    expected = load("digits", "cpu")
    losses, answers = expected.fit(x, y, batch_size=12).losses, expected.predict(x)
    for _ in range(2):
        runtime = load("digits", "fastest")
        np.testing.assert_allclose(runtime.fit(x, y, batch_size=12).losses, losses, rtol=1e-5)
        np.testing.assert_allclose(runtime.predict(x), answers, atol=1e-5)
        report = runtime.delegate_report()
        assert report.programs["train"].delegates == report.programs["predict"].delegates == (fastest,)
        assert report.programs["refresh"].delegates == ("cpu",)
    # Once for each program, not again in the second runtime.
    assert measured == [{"cpu", "openvino"}] * 2
