"""Model.fix: inputs and sizes with one value for good; branches and weights that this leaves without a use go."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from archipel import Model, autodiff, training
from archipel.compression import CompressedModel
from archipel.errors import GraphError
from archipel.graph import check_model
from tests.support.voice_activity import voice_activity

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("voice") / "voice.onnx"
    path.write_bytes(voice_activity().SerializeToString())
    return path


@pytest.fixture(scope="module")
def whole(path: Path) -> Model:
    return Model.from_onnx(path)


def run(model: Model | Path, **feed: np.ndarray) -> list[np.ndarray]:
    data = model.to_bytes() if isinstance(model, Model) else str(model)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"]).run(None, feed)


def operators(model: Model) -> Counter[str]:
    return Counter(node.op_type for node in model.ir.graph.all_nodes())


@pytest.mark.parametrize(("rate", "suffix"), [(16000, "16k"), (8000, "8k")])
@pytest.mark.parametrize("sizes", [{}, {"samples": 20}], ids=["any length", "20 samples"])
def test_the_branch_of_a_rate(path: Path, whole: Model, rate: int, suffix: str, sizes: dict[str, int]) -> None:
    model = whole.fix({"rate": rate, "state": 0.0}, sizes)
    check_model(model.ir)
    assert [port.name for port in model.inputs] == ["sound"]
    assert [port.name for port in model.outputs] == ["speech", "next"]
    assert len(whole.parameter_names) == 12
    assert len(model.parameter_names) == 6
    assert all(name.endswith(suffix) for name in model.parameter_names)
    assert operators(whole)["If"] == 3
    assert operators(model)["If"] == (0 if sizes else 1)
    for batch, length in ((1, 20), (3, 20), *(() if sizes else ((2, 4),))):
        sound, state = RNG.standard_normal((batch, length)).astype(np.float32), np.zeros((2, batch, 6), np.float32)
        expected = run(path, sound=sound, state=state, rate=np.array(rate))
        for found, want in zip(run(model, sound=sound), expected, strict=True):
            np.testing.assert_array_equal(found, want)


def test_a_state_of_given_numbers_is_repeated_for_each_example(path: Path, whole: Model) -> None:
    state = RNG.standard_normal((2, 1, 6)).astype(np.float32)
    model = whole.fix({"state": state})
    assert [port.name for port in model.inputs] == ["sound", "rate"]
    assert operators(model)["If"] == operators(whole)["If"]
    sound = RNG.standard_normal((3, 20)).astype(np.float32)
    for rate in (16000, 8000):
        feed = {"sound": sound, "rate": np.array(rate)}
        expected = run(path, **feed, state=np.repeat(state, 3, 1))
        for found, want in zip(run(model, **feed), expected, strict=True):
            np.testing.assert_array_equal(found, want)


def test_an_array_gives_the_free_sizes_that_it_fills(whole: Model) -> None:
    model = whole.fix({"state": np.zeros((2, 5, 6)), "rate": 8000})
    assert [port.shape for port in model.inputs] == [(5, "samples")]


@pytest.mark.sampled(every=3)
def test_what_is_left_trains(whole: Model) -> None:
    model = whole.fix({"rate": 16000, "state": 0.0}, {"samples": 20})
    step = training.step_graph(model, training.losses.mse(), training.optimizers.adam())
    sound = RNG.standard_normal((8, 20)).astype(np.float32) * np.repeat([[0.01], [1.0]], 4, 0).astype(np.float32)
    speech = np.repeat([[0.0], [1.0]], 4, 0).astype(np.float32)
    losses = training.run_steps(step, [(sound, speech)] * 60, {"lr": 0.02})
    assert losses[-1] < 0.3 * losses[0]


def test_the_report_says_what_is_fixed(whole: Model) -> None:
    report = whole.fix({"rate": 16000}, {"samples": 20}).import_report
    assert report is not None
    assert report.notes[-1] == "fixed: input 'rate', size 'samples' (20)"
    assert whole.import_report is not None
    assert whole.import_report.notes == report.notes[:-1]


@pytest.mark.parametrize(
    ("values", "sizes", "message"),
    [
        ({"speed": 1}, {}, "'speed' is no input of the model; there are: sound, state, rate"),
        ({"rate": 0.5}, {}, "'rate' is int64, and the given float64 does not fit that"),
        (
            {"state": np.zeros((3, 1, 6))},
            {},
            r"'state' has the shape \[2, 'batch', 6\], and the given value \[3, 1, 6\]",
        ),
        ({"state": np.zeros((1, 2, 1, 6))}, {}, r"and the given value \[1, 2, 1, 6\]"),
        ({}, {"length": 4}, "no input has a free size 'length'; there are: batch, samples"),
        ({}, {"samples": 0}, "the size 'samples' is 0; give a whole number of 1 or more"),
        ({"state": np.zeros((2, 5, 6)), "sound": np.zeros((4, 20))}, {}, "for the size 'batch', which is"),
    ],
)
def test_what_does_not_fit_is_refused(
    whole: Model, values: dict[str, object], sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(GraphError, match=message):
        whole.fix(values, sizes)  # type: ignore[arg-type]


def test_sizes_that_the_graph_does_not_allow_are_refused() -> None:
    model = Model.from_proto(
        onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, m] x) => (float[n, 2] y) <float[3, 2] w = {1, 2, 3, 4, 5, 6}> { y = MatMul (x, w) }""")
    )
    with pytest.raises(GraphError, match=r"fix: the graph does not allow these values: .*MatMul"):
        model.fix(sizes={"m": 4})


def test_a_program_is_refused(whole: Model) -> None:
    step = training.step_graph(
        whole.fix({"rate": 16000, "state": 0.0}, {"samples": 20}), training.losses.mse(), training.optimizers.sgd()
    )
    with pytest.raises(GraphError, match="fix: the model is a program"):
        step.fix({"rate": 1})
    with pytest.raises(GraphError, match="limit_loops: the model is a program"):
        step.limit_loops(3)


def test_a_compressed_model_with_another_graph_that_trains_is_refused(whole: Model) -> None:
    fixed = whole.fix({"rate": 16000, "state": 0.0}, {"samples": 20})
    compressed = CompressedModel(fixed.ir, fixed)
    for change in (lambda: compressed.fix({}), lambda: compressed.limit_loops(3)):
        with pytest.raises(GraphError, match="has another graph that trains; do this before"):
            change()


def test_one_after_the_other_is_as_good_as_all_at_once(path: Path, whole: Model) -> None:
    model = whole.fix({"state": 0.0}).fix({"rate": 8000}).fix(sizes={"samples": 20})
    assert [port.shape for port in model.inputs] == [("batch", 20)]
    sound = RNG.standard_normal((3, 20)).astype(np.float32)
    expected = run(path, sound=sound, state=np.zeros((2, 3, 6), np.float32), rate=np.array(8000))
    for found, want in zip(run(model, sound=sound), expected, strict=True):
        np.testing.assert_array_equal(found, want)


def test_a_squeeze_of_whichever_axes_have_one_item_names_the_remedy() -> None:
    """With a free batch nobody knows whether its axis is squeezed as well."""
    model = Model.from_proto(
        onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        agraph (float[1, batch, 4] x) => (float s) { h = Squeeze (x)  s = ReduceSum <keepdims = 0> (h) }""")
    )
    with pytest.raises(GraphError, match=r"the shape of 'h' \(output of Squeeze .*\) is not known; .*Squeeze its axes"):
        autodiff.gradient(model, of="s", wrt=["x"])
