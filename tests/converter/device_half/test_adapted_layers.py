"""Adapters on layers of every kind and layout: what they compute, what they begin with, and which weights get one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

from archipel import Model
from archipel.bundle import Bundle
from archipel.errors import ConversionError
from archipel.lite_runtime import Runtime

Make = Callable[..., Bundle]


def products() -> Model:
    """MatMul and Gemm with weights [in, out], and between them a transposed convolution of two groups."""
    rng = np.random.default_rng(1)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return onnx.numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)

    helper = onnx.helper
    nodes = [
        helper.make_node("MatMul", ["x", "first"], ["a"]),
        helper.make_node("Tanh", ["a"], ["b"]),
        helper.make_node("Reshape", ["b", "to"], ["c"]),
        helper.make_node("ConvTranspose", ["c", "up"], ["d"], group=2),
        helper.make_node("Flatten", ["d"], ["e"]),
        helper.make_node("Gemm", ["e", "last", "bias"], ["y"]),
    ]
    weights = [weight("first", 4, 8), weight("up", 4, 3, 2), weight("last", 18, 3), weight("bias", 3)]
    weights.append(onnx.numpy_helper.from_array(np.array([-1, 4, 2]), "to"))
    field = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 4])
    result = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 3])
    graph = helper.make_graph(nodes, "products", [field], [result], weights)
    return Model.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))


@pytest.mark.sampled(every=4)
def test_adapters_on_every_kind_of_layer(make: Make, data: tuple[np.ndarray, np.ndarray]) -> None:
    source, (x, y) = products(), data
    bundle = make("lora", source, strategy_options={"rank": 3, "alpha": 6.0, "full": "bias"}, epochs=3)
    shapes = {spec.name: spec.shape for spec in bundle.manifest.parameters}
    assert shapes == {
        "first.lora_a": (4, 3), "first.lora_b": (3, 8), "up.lora_a": (4, 3), "up.lora_b": (3, 6),
        "last.lora_a": (18, 3), "last.lora_b": (3, 3), "bias": (3,),
    }  # fmt: skip
    device = Runtime(bundle)
    before = device.evaluate(x, y)["loss"]
    device.fit(x, y, epochs=20, batch_size=4, hyperparameters={"lr": 0.02})
    assert device.evaluate(x, y)["loss"] < before
    p = device.parameters()
    assert all(p[name].any() for name in shapes)
    # By hand, with PyTorch's layers and the published weights.
    w = {k: torch.tensor(v + 2.0 * (p[f"{k}.lora_a"] @ p[f"{k}.lora_b"]).reshape(v.shape))
         for k, v in source.parameters.items() if k != "bias"}  # fmt: skip
    hidden = torch.tanh(torch.tensor(x) @ w["first"]).reshape(-1, 4, 2)
    up = nn.functional.conv_transpose1d(hidden, w["up"], groups=2)
    expected = up.flatten(1) @ w["last"] + torch.tensor(p["bias"])
    np.testing.assert_allclose(device.predict(x), expected.numpy(), rtol=1e-4, atol=1e-4)
    assert device.evaluate(x, y)["correct"] == (expected.numpy().argmax(1) == y).sum()


def layouts() -> Model:
    """Weights in other layouts than their layers': TensorFlow's kernel, CNTK's dense layer, PyTorch's Linear."""
    rng = np.random.default_rng(2)
    text = """<ir_version: 10, opset_import: ["" : 21]> g (float[n, 4] x) => (float[n, 3] y)
        <int64[4] picture = {-1, 1, 2, 2}, int64[2] matrix = {12, 5}, int64[2] flat = {0, -1}> {
            p = Reshape (x, picture)  k = Transpose <perm = [3, 2, 0, 1]> (kernel)
            c = Conv <pads = [0, 0, 1, 1]> (p, k)  h = Tanh (c)  f = Reshape (h, flat)
            d = Reshape (dense, matrix)  m = MatMul (f, d)  t = Transpose (linear)  y = MatMul (m, t)
        }"""
    proto = onnx.parser.parse_model(text)
    weights = {"kernel": (2, 2, 1, 3), "dense": (3, 2, 2, 5), "linear": (3, 5)}
    for name, shape in weights.items():
        array = rng.standard_normal(shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return Model.from_proto(proto, weights)


@pytest.mark.sampled(every=8)
def test_adapters_on_weights_in_other_layouts(make: Make, data: tuple[np.ndarray, np.ndarray]) -> None:
    source, (x, y) = layouts(), data
    bundle = make("lora", source, strategy_options={"rank": 2}, epochs=3)
    assert {spec.name: spec.shape for spec in bundle.manifest.parameters} == {
        "kernel.lora_a": (4, 2), "kernel.lora_b": (2, 3), "dense.lora_a": (12, 2), "dense.lora_b": (2, 5),
        "linear.lora_a": (2, 5), "linear.lora_b": (3, 2),
    }  # fmt: skip
    device = Runtime(bundle)
    before = device.evaluate(x, y)["loss"]
    device.fit(x, y, epochs=20, batch_size=4, hyperparameters={"lr": 0.02})
    assert device.evaluate(x, y)["loss"] < before
    p = {name: torch.tensor(value) for name, value in device.parameters().items()}
    w = {name: torch.tensor(value) for name, value in source.parameters.items()}
    kernel, dense = (w[k] + (p[f"{k}.lora_a"] @ p[f"{k}.lora_b"]).reshape(w[k].shape) for k in ("kernel", "dense"))
    linear = w["linear"] + p["linear.lora_b"] @ p["linear.lora_a"]
    picture = nn.functional.pad(torch.tensor(x).reshape(-1, 1, 2, 2), (0, 1, 0, 1))
    hidden = torch.tanh(nn.functional.conv2d(picture, kernel.permute(3, 2, 0, 1)))
    expected = nn.functional.linear(hidden.flatten(1) @ dense.reshape(12, 5), linear)
    np.testing.assert_allclose(device.predict(x), expected.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(every=3)
def test_adapters_begin_without_effect_and_repeat(make: Make, data: tuple[np.ndarray, np.ndarray]) -> None:
    bundle = make("lora", products())
    source = ort.InferenceSession(products().to_bytes(), providers=["CPUExecutionProvider"])
    (expected,) = source.run(None, {"x": data[0]})
    np.testing.assert_allclose(Runtime(bundle).predict(data[0]), expected, rtol=1e-5, atol=1e-5)
    values = bundle.parameters()
    assert not any(values[name].any() for name in values if name.endswith("lora_b"))
    assert 0 < np.abs(values["first.lora_a"]).max() <= 0.5  # 1 / sqrt(4 inputs)
    assert {spec.name for spec in bundle.manifest.parameters} == {
        f"{name}.lora_{side}" for name in ("first", "up", "last") for side in "ab"
    }
    # The frozen weights are there once for all programs.
    assert bundle.tensor("last").shape == (18, 3)
    large = sum(array.nbytes for array in bundle.tensors.values())
    assert large < 2 * sum(array.nbytes for array in (*values.values(), *products().parameters.values()))


def test_a_rank_beyond_the_matrix_is_cut(make: Make) -> None:
    bundle = make("lora", products(), strategy_options={"rank": 16, "targets": "last"})
    assert {spec.shape for spec in bundle.manifest.parameters} == {(18, 3), (3, 3)}


def test_trainable_limits_the_adapters(make: Make) -> None:
    bundle = make("lora", products(), trainable=["first", "bias"])
    assert {spec.name for spec in bundle.manifest.parameters} == {"first.lora_a", "first.lora_b"}


def test_a_model_with_adapters_by_that_name_is_refused(make: Make) -> None:
    once = products()
    once.ir.graph.initializers["bias"].name = "first.lora_a"
    with pytest.raises(ConversionError, match=r"already has a tensor called 'first\.lora_a'"):
        make("lora", once)
