from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from archipel.compression import StaticInt8, quantize_static, refresh_program
from archipel.datasets import digits_by_writer
from archipel.errors import CompressionError
from archipel.graph import Model
from archipel.models import digits_cnn


@pytest.fixture(scope="module")
def digits() -> np.ndarray:
    return digits_by_writer().inputs()[::31]


@pytest.fixture(scope="module")
def model() -> Model:
    import torch

    return Model.from_torch(digits_cnn(seed=3), torch.zeros(2, 1, 28, 28))


@pytest.fixture(scope="module")
def quantized(model: Model, digits: np.ndarray) -> Model:
    return quantize_static(model, StaticInt8(), {model.inputs[0].name: digits})


def run(model: Model, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = ort.InferenceSession(model.to_bytes(), providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))


def weights(model: Model) -> dict[str, np.ndarray]:
    return {name: value.const_value.numpy() for name, value in model.ir.graph.initializers.items()}


def test_signature_stays_and_weights_are_int8(model: Model, quantized: Model) -> None:
    assert quantized.inputs == model.inputs
    assert quantized.outputs == model.outputs
    found = weights(quantized)
    for name, values in model.parameters.items():
        if name.endswith("weight"):
            assert found[f"{name}_quantized"].dtype == np.int8
            assert found[f"{name}_quantized"].shape == values.shape
            assert name not in found


def test_it_computes_nearly_the_same(model: Model, quantized: Model, digits: np.ndarray) -> None:
    name = model.inputs[0].name
    floats, ints = (next(iter(run(m, {name: digits}).values())) for m in (model, quantized))
    noise = np.square(floats - ints).mean() / np.square(floats).mean()
    assert noise < 1e-2  # signal to noise above 20 dB, for a network that nobody trained


def test_refresh_of_the_same_parameters_changes_nothing(model: Model, quantized: Model) -> None:
    refresh = refresh_program(quantized, model.parameters)
    fresh = run(refresh, model.parameters)
    found = weights(quantized)
    assert refresh.signature is not None
    tensors = {port.name: port.tensor for port in refresh.signature.outputs}
    assert len(tensors) == 16  # four layers, weight and bias, value and scale
    for name, values in fresh.items():
        assert values.dtype == found[tensors[name]].dtype
        np.testing.assert_array_equal(values, found[tensors[name]])


def test_refresh_against_quantizing_again(model: Model, quantized: Model, digits: np.ndarray) -> None:
    """New parameters, refreshed, are what onnxruntime's quantizer makes of them (activations' scales aside)."""
    rng = np.random.default_rng(0)
    moved = {n: (v + 0.05 * rng.standard_normal(v.shape)).astype(np.float32) for n, v in model.parameters.items()}
    changed = model.copy()
    for name, values in moved.items():
        changed.ir.graph.initializers[name].const_value = onnx_tensor(values, name)
    again = weights(quantize_static(changed, StaticInt8(), {model.inputs[0].name: digits}))
    refresh = refresh_program(quantized, model.parameters)
    fresh = run(refresh, moved)
    for name, values in moved.items():
        if name.endswith("weight"):
            np.testing.assert_array_equal(fresh[f"{name}_quantized.next"], again[f"{name}_quantized"])
            np.testing.assert_allclose(fresh[f"{name}_scale.next"], again[f"{name}_scale"], rtol=1e-6)
        else:
            scale = fresh[f"{name}_quantized_scale.next"]
            np.testing.assert_array_equal(fresh[f"{name}_quantized.next"], np.round(values / scale).astype(np.int32))


def onnx_tensor(values: np.ndarray, name: str) -> object:
    import onnx_ir as ir

    return ir.tensor(values, name=name)


def test_a_channel_of_zeros_stays_zero(model: Model, quantized: Model) -> None:
    zeroed = {name: values.copy() for name, values in model.parameters.items()}
    zeroed["conv1.weight"][3] = 0
    fresh = run(refresh_program(quantized, model.parameters), zeroed)
    assert np.all(fresh["conv1.weight_quantized.next"][3] == 0)
    assert all(np.isfinite(values).all() for values in fresh.values() if values.dtype == np.float32)


def test_refresh_of_a_float_model_is_the_identity(model: Model) -> None:
    refresh = refresh_program(model, model.parameters)
    fresh = run(refresh, model.parameters)
    for name, values in model.parameters.items():
        np.testing.assert_array_equal(fresh[f"{name}.next"], values)


def test_errors_say_what_to_do(model: Model) -> None:
    with pytest.raises(CompressionError, match="lacks input"):
        quantize_static(model, StaticInt8(), {"other": np.zeros((1, 1, 28, 28), np.float32)})
    with pytest.raises(CompressionError, match="at least one calibration example"):
        quantize_static(model, StaticInt8(), {model.inputs[0].name: np.zeros((0, 1, 28, 28), np.float32)})
    with pytest.raises(CompressionError, match="'ghost' is not in the predict graph"):
        refresh_program(model, {"ghost": np.zeros(2, np.float32)})


def test_a_bias_without_a_quantized_layer_is_refused() -> None:
    """A quantized bias whose node is not recognized must not be left behind when the parameters move."""
    graph = helper.make_graph(
        [
            helper.make_node("DequantizeLinear", ["b_quantized", "b_quantized_scale"], ["b"]),
            helper.make_node("Add", ["x", "b"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 2])],
        [
            numpy_helper.from_array(np.ones(2, np.int32), "b_quantized"),
            numpy_helper.from_array(np.array(0.5, np.float32), "b_quantized_scale"),
        ],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(proto)
    with pytest.raises(CompressionError, match="third input of a quantized Conv or Gemm"):
        refresh_program(Model.from_proto(proto), {"b": np.ones(2, np.float32)})
