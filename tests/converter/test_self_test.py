"""Self-test vectors: what is in them, what passes and what does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import nn

from archipel import Model, models
from archipel import bundle as b
from archipel.bundle import roles
from archipel.compression import StaticInt8, compress
from archipel.converter import Signing, convert
from archipel.converter.lowering import predict_program
from archipel.converter.self_test import FILE, STEPS, self_test
from archipel.errors import ConversionError
from archipel.lite_runtime import Runtime
from archipel.lite_runtime.engines.onnx_runtime import open_exact

KEY = b.generate_key()


def program(text: str, **initializers: np.ndarray) -> Model:
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}')
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(a, name) for name, a in initializers.items())
    return predict_program(Model.from_proto(proto))


@pytest.fixture
def tensors(tmp_path: Path) -> Callable[[bytes], dict[str, np.ndarray]]:
    def read(data: bytes) -> dict[str, np.ndarray]:
        path = tmp_path / "vectors.safetensors"
        path.write_bytes(data)
        return {name: np.array(array) for name, array in b.read_weights(path).items()}

    return read


def right(test: b.SelfTest, got: np.ndarray, expected: np.ndarray) -> bool:
    """The manifest's rule."""
    away = np.abs(got.astype(np.float64) - expected)
    return bool((away <= test.atol + test.rtol * np.abs(expected.astype(np.float64))).all())


@pytest.fixture(scope="module")
def network() -> nn.Module:
    return models.lenet(0).eval()


@pytest.fixture(scope="module")
def model(network: nn.Module) -> Model:
    return Model.from_torch(network, torch.zeros(2, 1, 28, 28))


@pytest.mark.sampled(every=4)
def test_the_vectors_are_what_pytorch_answers(
    network: nn.Module, model: Model, tensors: Callable[[bytes], dict[str, np.ndarray]]
) -> None:
    test, data = self_test(predict_program(model))
    found = tensors(data)
    assert test.file == FILE
    assert {name: (a.shape, a.dtype.name) for name, a in found.items()} == {
        "example/input": ((4, 1, 28, 28), "float32"),
        "output/output": ((4, 10), "float32"),
    }
    x = found["example/input"]
    assert 0.9 < x.std() < 1.1
    assert len(np.unique(x.round(3), axis=0)) == 4
    with torch.no_grad():
        answer = network(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(found["output/output"], answer, atol=1e-6)
    assert right(test, answer, found["output/output"])
    assert test.rtol == 1e-3
    assert test.atol == pytest.approx(1e-3 * np.abs(answer).max(), rel=1e-3)


@pytest.mark.sampled(every=3)
def test_the_same_model_gives_the_same_bytes(model: Model) -> None:
    assert self_test(predict_program(model)) == self_test(predict_program(model))


@pytest.mark.parametrize("int8", [False, True], ids=["float", "int8"])
@pytest.mark.sampled(every=6)
def test_a_model_with_a_damaged_weight_does_not_pass(
    model: Model, int8: bool, tensors: Callable[[bytes], dict[str, np.ndarray]]
) -> None:
    calibration = {"input": np.random.default_rng(0).standard_normal((32, 1, 28, 28), np.float32)}
    whole = (
        compress(model, [StaticInt8(narrow_convolutions="int8")], calibration=calibration)[0].deployed()
        if int8
        else model
    )
    test, data = self_test(predict_program(whole), examples=calibration)
    found = tensors(data)
    np.testing.assert_array_equal(found["example/input"], calibration["input"][:4])
    damaged = whole.copy()
    name = "conv2.weight_quantized" if int8 else "conv2.weight"
    weight = np.array(damaged.ir.graph.initializers[name].const_value.numpy())
    weight[3] = -weight[3]  # of 16 filters
    damaged.ir.graph.initializers[name].const_value = onnx_tensor(weight, name)
    answers = []
    for candidate in (whole, damaged):
        for level in (ort.GraphOptimizationLevel.ORT_DISABLE_ALL, ort.GraphOptimizationLevel.ORT_ENABLE_ALL):
            options = ort.SessionOptions()
            options.graph_optimization_level = level
            session = open_exact(candidate.to_bytes(), options)
            (answer,) = session.run(None, {"input": found["example/input"]})
            answers.append(right(test, answer, found["output/output"]))
    # Without optimization int8 is computed in float, and rounds in other places.
    assert answers == [True, True, False, False]


def onnx_tensor(array: np.ndarray, name: str) -> ir.TensorProtocol:
    return ir.tensor(array, name=name)


@pytest.mark.sampled(every=4)
def test_steps_of_int8(model: Model, tensors: Callable[[bytes], dict[str, np.ndarray]]) -> None:
    calibration = {"input": np.random.default_rng(0).standard_normal((32, 1, 28, 28), np.float32)}
    int8 = compress(model, [StaticInt8()], calibration=calibration)[0].deployed()
    test, data = self_test(predict_program(int8))
    answers = tensors(data)["output/output"]
    assert test.atol == pytest.approx(STEPS * np.abs(answers).max() / 255, rel=0.01)  # of a last layer with floats out
    graph = onnx.load_model_from_string(int8.to_bytes())
    last = graph.graph.output[0].name
    scale, zero = np.array(0.02, np.float32), np.array(128, np.uint8)
    graph.graph.initializer.extend([onnx.numpy_helper.from_array(scale, "s"), onnx.numpy_helper.from_array(zero, "z")])
    for node in graph.graph.node:
        node.output[:] = ["before" if name == last else name for name in node.output]
    graph.graph.node.extend([
        onnx.helper.make_node("QuantizeLinear", ["before", "s", "z"], ["integers"]),
        onnx.helper.make_node("DequantizeLinear", ["integers", "s", "z"], [last]),
    ])  # fmt: skip
    test, _ = self_test(predict_program(Model.from_proto(graph)))
    assert test.atol == pytest.approx(STEPS * 0.02, rel=0.01)  # of one whose output is on a grid


def test_a_device_passes(model: Model, tmp_path: Path, tensors: Callable[[bytes], dict[str, np.ndarray]]) -> None:
    test, data = self_test(predict_program(model))
    bundle = convert(model, tmp_path / "bundle", signing=Signing(KEY))
    found = tensors(data)
    assert right(test, Runtime(bundle).predict(found["example/input"]), found["output/output"])


@pytest.mark.sampled(every=4)
def test_tokens_are_below_the_size_of_the_table(tensors: Callable[[bytes], dict[str, np.ndarray]]) -> None:
    model = Model.from_torch(models.char_rnn(0, vocabulary=12, hidden=8), torch.zeros(2, 9, dtype=torch.int64))
    test, data = self_test(predict_program(model))
    tokens = tensors(data)["example/characters"]
    assert (tokens.dtype, tokens.shape) == (np.int64, (4, 9))
    assert (tokens.min(), tokens.max()) == (0, 11)
    assert test.atol > 0


MIXED = """agraph (float[batch, 3] x, uint8[batch, 2] small, int32[batch, time] tokens, bool[batch] flag)
=> (float[batch, 3] y, int64[batch] best, bool[batch] f, float[batch, time, 2] z, float[batch, 2] s)
<float[5, 2] table> { y = Relu (x) best = ArgMax<axis = 1, keepdims = 0> (x) f = Not (flag)
u = Unsqueeze (tokens, one) q = Squeeze (u, one) z = Gather (table, q) s = Cast<to = 1> (small) }"""


def test_several_inputs_and_outputs(tensors: Callable[[bytes], dict[str, np.ndarray]]) -> None:
    table = np.arange(10, dtype=np.float32).reshape(5, 2)
    test, data = self_test(program(MIXED, table=table, one=np.array([1])), rows=6)
    found = tensors(data)
    x, tokens = found["example/x"], found["example/tokens"]
    assert tokens.shape == (6, 16)
    assert set(tokens.ravel()) == {0, 1, 2, 3, 4}
    assert found["example/small"].max() > 10
    assert set(found["example/flag"]) == {False, True}
    np.testing.assert_array_equal(found["output/best"], x.argmax(1))
    np.testing.assert_array_equal(found["output/f"], ~found["example/flag"])
    np.testing.assert_array_equal(found["output/z"], table[tokens])
    # Whole numbers must be exact, under one tolerance for all outputs.
    assert not right(test, found["output/best"] + 1, found["output/best"])
    assert not right(test, ~found["output/f"], found["output/f"])
    assert right(test, found["output/y"] * 1.0005, found["output/y"])


def test_only_whole_numbers(tensors: Callable[[bytes], dict[str, np.ndarray]]) -> None:
    test, _ = self_test(program("agraph (float[batch, 3] x) => (int64[batch, 1] y) { y = ArgMax<axis = 1> (x) }"))
    assert (test.rtol, test.atol) == (0.0, 0.0)


def test_outputs_of_very_different_size(tensors: Callable[[bytes], dict[str, np.ndarray]]) -> None:
    text = "agraph (float[batch, 3] x) => (float[batch, 3] y, float[batch, 3] z) { y = Tanh (x) z = Mul (y, k) }"
    test, data = self_test(program(text, k=np.array(20.0, np.float32)))
    found = tensors(data)
    assert test.atol < 3e-3  # of 20, and of 1
    assert not right(test, found["output/y"] + 0.01, found["output/y"])


def test_a_fixed_batch(tensors: Callable[[bytes], dict[str, np.ndarray]]) -> None:
    text = "agraph (float[3, 2] x) => (float[3, 2] y) { y = Relu (x) }"
    given = np.array([[1, -2], [3, 4]], np.float64)
    _, data = self_test(program(text), examples={"x": given})
    found = tensors(data)
    np.testing.assert_array_equal(found["example/x"], np.array([[1, -2], [3, 4], [1, -2]], np.float32))
    np.testing.assert_array_equal(found["output/y"], np.array([[1, 0], [3, 4], [1, 0]], np.float32))
    assert tensors(self_test(program(text))[1])["example/x"].shape == (3, 2)


def test_integers_whose_limit_does_not_show(tensors: Callable[[bytes], dict[str, np.ndarray]]) -> None:
    """An index into a table of two rows, made by arithmetic: only zeros are safe."""
    text = "agraph (int64[batch, 2] x) => (float[batch, 2] y) { d = Mul (x, k) y = Gather (table, d) }"
    _, data = self_test(program(text, k=np.array(50), table=np.array([1, 2], np.float32)))
    assert not tensors(data)["example/x"].any()


def test_a_model_of_pictures_of_any_size_larger_than_16(tensors: Callable[[bytes], dict[str, np.ndarray]]) -> None:
    text = (
        """agraph (float[batch, 1, h, w] x) => (float[batch, 1, a, b] y) <float[1, 1, 20, 20] k> { y = Conv (x, k) }"""
    )
    _, data = self_test(program(text, k=np.ones((1, 1, 20, 20), np.float32)))
    assert tensors(data)["example/x"].shape == (4, 1, 32, 32)


def test_parameters_and_state_that_are_inputs(tensors: Callable[[bytes], dict[str, np.ndarray]]) -> None:
    text = "agraph (float[batch, 2] x, float[2] w, float s, float h) => (float[batch, 2] y) { "
    model = program(text + "a = Mul (x, w) b = Add (a, s) y = Mul (b, h) }")
    x, *_ = model.signature.inputs
    model.signature = roles.Program(
        kind="predict",
        inputs=(
            x,
            roles.Parameter(name="w", dtype="float32", shape=(2,), tensor="weight"),
            roles.State(name="s", dtype="float32", shape=(), tensor="s", lifetime="device", init=3.0),
            roles.Hyperparameter(name="h", dtype="float32", shape=(), default=2.0, minimum=0, maximum=9),
        ),
        outputs=model.signature.outputs,
    )
    _, data = self_test(model, {"weight": np.array([5, 7], np.float32)})
    found = tensors(data)
    assert found.keys() == {"example/x", "output/y"}
    np.testing.assert_allclose(found["output/y"], (found["example/x"] * [5, 7] + 3) * 2, rtol=1e-6)
    with pytest.raises(ConversionError, match="no value for 'weight', which predict reads"):
        self_test(model)


def test_a_predict_program_that_cannot_be_run() -> None:
    text = "agraph (float[batch, 2] x) => (float[batch, 9] y) { y = Reshape (x, shape) }"
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}')
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0, 9]), "shape"))
    with pytest.raises(ConversionError, match=r"cannot be run on 'x' \(float32\[batch, 2\]\): .*Reshape"):
        self_test(predict_program(Model.from_proto(proto)))


def test_answers_that_are_not_finite() -> None:
    """Pseudo-random numbers may be none that the model is made for; given examples are."""
    predict = program("agraph (float[batch, 2] x) => (float[batch, 2] y) { y = Log (x) }")
    assert self_test(predict) is None
    with pytest.raises(ConversionError, match="output 'y' of predict is not finite for the examples"):
        self_test(predict, examples={"x": -np.ones((4, 2), np.float32)})
    assert self_test(predict, examples={"x": np.ones((4, 2), np.float32)}) is not None


def test_examples_that_do_not_fit(model: Model) -> None:
    predict = predict_program(model)
    with pytest.raises(
        ConversionError, match=r"examples lack 'input' \(float32\[batch, 1, 28, 28\]\); they have \['x'\]"
    ):
        self_test(predict, examples={"x": np.zeros((2, 1))})
    with pytest.raises(ConversionError, match="examples of 'input' are complex128, expected float32"):
        self_test(predict, examples={"input": np.zeros((2, 1, 28, 28), np.complex128)})
    with pytest.raises(ConversionError, match=r"have the shape \[2, 3, 28, 28\], expected float32\[batch, 1, 28, 28\]"):
        self_test(predict, examples={"input": np.zeros((2, 3, 28, 28))})
    with pytest.raises(ConversionError, match=r"have the shape \[2, 28, 28\], expected float32\[batch, 1, 28, 28\]"):
        self_test(predict, examples={"input": np.zeros((2, 28, 28))})
    with pytest.raises(ConversionError, match="expected a predict program"):
        self_test(model)


@pytest.mark.parametrize(
    "text",
    [
        "agraph (float[batch, 2] x) => (float y) { y = ReduceSum<keepdims = 0> (x) }",
        "agraph (float[batch, 2] x) => (float[2, batch] y) { y = Transpose (x) }",
    ],
)
def test_outputs_without_a_row_for_each_example(text: str) -> None:
    assert self_test(program(text), rows=3) is None
