"""`compress`: the same arguments give the same model, whatever stops the run on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import onnx
import pytest

from archipel import Model
from archipel.compression import CompressedModel, FineTune, PruneWeights, StaticInt8, compress
from archipel.compression.recipe import load_recipe, parse_recipe
from archipel.datasets import digits_by_writer
from archipel.errors import CompressionError

RECIPE = [
    FineTune(steps=6, batch_size=16, schedule="one_cycle", augment="shift"),
    PruneWeights(sparsity=0.5, fine_tune=FineTune(steps=4, batch_size=16)),
    StaticInt8(examples=32),
]


def network() -> Model:
    """A small convolution network as a file of anybody's."""
    rng = np.random.default_rng(0)
    weights = {"w": (8, 1, 5, 5), "b": (8,), "v": (10, 288), "c": (10,)}
    graph = onnx.parser.parse_graph(
        """net (float[batch, 1, 28, 28] x) => (float[batch, 10] y) {
            a = Conv <strides = [4, 4]> (x, w, b) r = Relu (a) f = Flatten (r) y = Gemm <transB = 1> (f, v, c) }"""
    )
    graph.initializer.extend(
        onnx.numpy_helper.from_array((0.1 * rng.standard_normal(shape)).astype(np.float32), name)
        for name, shape in weights.items()
    )
    return Model.from_proto(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)]))


@pytest.fixture(scope="module")
def data() -> tuple[np.ndarray, np.ndarray]:
    digits = digits_by_writer()
    return digits.inputs()[:400], digits.targets()[:400]


def tensors(model: CompressedModel) -> dict[str, np.ndarray]:
    return {str(v.name): v.const_value.numpy() for v in model.deployed().ir.graph.initializers.values()}


def same(a: CompressedModel, b: CompressedModel) -> bool:
    ours, theirs = tensors(a), tensors(b)
    return ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.sampled(every=4)
def test_training_lowers_the_loss_and_the_report_tells(data: tuple[np.ndarray, np.ndarray]) -> None:
    small, report = compress(network(), [FineTune(epochs=4, lr=3e-3)], data=data, validation=data)
    assert report.before.loss is not None
    assert report.after.loss is not None
    assert report.after.loss < 0.7 * report.before.loss
    assert report.after.accuracy is not None
    x, y = data
    answers = run(small.deployed(), x)
    assert report.after.accuracy == pytest.approx((answers.argmax(1) == y).mean())
    shifted = answers - answers.max(1, keepdims=True)
    losses = np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(y)), y]
    assert report.after.loss == pytest.approx(losses.mean(), rel=1e-4)
    assert report.before.flops == 2 * (8 * 25 * 36 + 288 * 10)
    assert report.before.weights == 8 * 25 + 8 + 2880 + 10
    assert "FineTune" in str(report)
    assert report.to_dict()["steps"][0]["facts"]["training"]


def run(model: Model, x: np.ndarray) -> np.ndarray:
    import onnxruntime

    session = onnxruntime.InferenceSession(model.to_bytes(), providers=["CPUExecutionProvider"])
    return session.run(None, {model.inputs[0].name: x})[0]  # type: ignore[no-any-return]


@pytest.mark.sampled(every=8)
def test_stopped_anywhere_it_goes_on_to_the_same_model(data: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> None:
    model = network()
    told: list[object] = []
    whole, report = compress(model, RECIPE, data=data, validation=data, seed=3, on_progress=told.append)
    assert len(told) > 14
    for stop in range(2, len(told), 6):
        calls = 0

        def interrupt(_: object, stop: int = stop) -> None:
            nonlocal calls
            calls += 1
            if calls == stop:
                raise KeyboardInterrupt

        folder = tmp_path / str(stop)
        with pytest.raises(KeyboardInterrupt):
            compress(model, RECIPE, data=data, validation=data, seed=3, folder=folder, on_progress=interrupt)
        again: list[object] = []
        resumed, other = compress(
            model, RECIPE, data=data, validation=data, seed=3, folder=folder, on_progress=again.append
        )
        assert same(whole, resumed), stop
        assert [step.after for step in other.steps] == [step.after for step in report.steps]
        assert len(again) <= len(told)
    # A finished run is there at once, and another one does not take its place.
    resumed, _ = compress(model, RECIPE, data=data, validation=data, seed=3, folder=folder)
    assert same(whole, resumed)
    with pytest.raises(CompressionError, match="a run of another model, recipe, seed, data or engine"):
        compress(model, RECIPE, data=data, validation=data, seed=4, folder=folder)


CHILD = """
    import sys
    sys.path.insert(0, {tests!r})
    from test_compress import RECIPE, network
    from archipel.compression import compress
    from archipel.datasets import digits_by_writer
    d = digits_by_writer()
    data = d.inputs()[:400], d.targets()[:400]
    told = lambda p: print(p, flush=True)
    compress(network(), RECIPE, data=data, validation=data, seed=3, folder={folder!r}, on_progress=told)
"""


@pytest.mark.slow
def test_killed_it_goes_on_to_the_same_model(data: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> None:
    model = network()
    whole, _ = compress(model, RECIPE, data=data, validation=data, seed=3)
    code = textwrap.dedent(CHILD.format(tests=str(Path(__file__).parent), folder=str(tmp_path / "run")))
    for lines in (2, 5, 9, 12):
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ.copy())
        assert child.stdout is not None
        for _ in range(lines):
            child.stdout.readline()
        time.sleep(0.01 * lines)
        child.send_signal(signal.SIGKILL)
        child.communicate()
    resumed, _ = compress(model, RECIPE, data=data, validation=data, seed=3, folder=tmp_path / "run")
    assert same(whole, resumed)


def test_it_saves_what_devices_run_or_what_trains(data: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> None:
    x, _ = data
    small, report = compress(network(), [StaticInt8(examples=32)], calibration=x)
    small.save(tmp_path / "small.onnx")
    small.save(tmp_path / "float.onnx", trainable=True)
    assert (tmp_path / "small.onnx").stat().st_size == report.after.nbytes < 0.5 * report.before.nbytes
    found = Model.from_onnx(tmp_path / "small.onnx")
    np.testing.assert_allclose(run(found, x[:32]), run(small.deployed(), x[:32]), atol=1e-5)
    trainable = Model.from_onnx(tmp_path / "float.onnx")
    assert {"w", "b", "v", "c"} <= set(trainable.parameter_names)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[part", "not TOML"),
        ("x = 1", r"a list of \[\[part\]\] tables, each with a kind; unknown: 'x'"),
        ("[[part]]\nkind = 'shrink'", "part 1: kind is one of prune_channels, "),
        ("[[part]]\nkind = 'fine_tune'\nepoch = 1", r"part 1 \(fine_tune\): no field 'epoch'; there are epochs, "),
        ("[[part]]\nkind = 'fine_tune'\nepochs = '1'", r"part 1 \(fine_tune\): Expected `int`, got `str`"),
        ("[[part]]\nkind = 'fine_tune'\nepochs = 0", "epochs must be a whole number from 1, is 0"),
        ("[[part]]\nkind = 'prune_weights'\n[part.fine_tune]\nlr = -1", "lr must be above 0, is -1"),
    ],
)
def test_a_wrong_recipe_is_named(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(CompressionError, match=message):
        parse_recipe(text)
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(CompressionError, match=r"r\.toml: "):
        load_recipe(tmp_path / "r.toml")


def test_what_a_later_part_lacks_is_told_before_the_first() -> None:
    told: list[str] = []
    with pytest.raises(CompressionError, match="part 2 of the recipe, StaticInt8: StaticInt8 needs validation data"):
        compress(
            network(),
            [FineTune(steps=1), StaticInt8(max_drop=1.0)],
            data=(np.zeros((4, 1, 28, 28), np.float32), np.zeros(4, int)),
            on_progress=lambda progress: told.append(progress.what),
        )
    assert told == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"recipe": "int8"}, "expected a list of parts, got str"),
        ({"recipe": [3]}, "3 is no part; there are PruneChannels"),
        ({"recipe": [FineTune()]}, "part 1 of the recipe, FineTune: FineTune needs training data; pass data="),
        ({"recipe": [], "data": (np.zeros((2, 1, 28, 28)), np.zeros(3, int))}, "same number of examples"),
        ({"recipe": [], "data": np.zeros((2, 1, 28, 28), np.float32)}, "data: no labels"),
        (
            {"recipe": [], "data": (np.zeros((2, 1, 8, 8)), np.zeros(2, int))},
            r"input 'x' has the shape .* got \[2, 1, 8",
        ),
        ({"recipe": [], "data": {"y": np.zeros(2), "label": np.zeros(2)}}, r"the model has the inputs \['x'\], got"),
        (
            {"recipe": [], "validation": (np.full((2, 1, 28, 28), 1j), np.zeros(2, int))},
            "takes float32, got complex128",
        ),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(CompressionError, match=message):
        compress(network(), **arguments)  # type: ignore[arg-type]
