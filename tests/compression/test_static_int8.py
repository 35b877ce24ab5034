"""Static int8: what devices run of it, and `refresh`."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest

from archipel.compression import CompressedModel, StaticInt8, compress
from archipel.compression.deploy import deploy, refresh_program
from archipel.datasets import digits_by_writer
from archipel.errors import CompressionError
from archipel.graph import Model
from archipel.lite_runtime.engines.onnx_runtime import open_exact
from archipel.models import digits_cnn


@pytest.fixture(scope="module")
def digits() -> np.ndarray:
    return digits_by_writer().inputs()[::31]


@pytest.fixture(scope="module")
def model() -> Model:
    import torch

    return Model.from_torch(digits_cnn(seed=3), torch.zeros(2, 1, 28, 28))


@pytest.fixture(scope="module")
def quantized(model: Model, digits: np.ndarray) -> CompressedModel:
    return compress(model, [StaticInt8(narrow_convolutions="int8")], calibration=digits)[0]


def run(model: Model, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    options = ort.SessionOptions()
    session = open_exact(model.to_bytes(), options)
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))


def weights(model: Model) -> dict[str, np.ndarray]:
    return {name: value.const_value.numpy() for name, value in model.ir.graph.initializers.items()}


@pytest.mark.sampled(every=4)
def test_signature_stays_and_weights_are_int8(model: Model, quantized: CompressedModel) -> None:
    deployed = quantized.deployed()
    assert deployed.inputs == quantized.inputs == model.inputs
    assert deployed.outputs == quantized.outputs == model.outputs
    found = weights(deployed)
    for name, values in model.parameters.items():
        assert name not in found
        integers = found[f"{name}_quantized"]
        assert integers.shape == values.shape
        if name.endswith("weight"):
            assert integers.dtype == np.int8
            largest = np.abs(values).max(tuple(range(1, values.ndim)), keepdims=True)
            np.testing.assert_allclose(found[f"{name}_scale"], largest.ravel() / 127, rtol=1e-6)
            np.testing.assert_array_equal(integers, np.round(values / (largest / np.float32(127))).astype(np.int8))
        else:
            assert integers.dtype == np.int32
            weight_scale = found[name.replace("bias", "weight") + "_scale"].astype(np.float64)
            data_scale = np.median(values[values != 0] / (integers * weight_scale)[values != 0])  # one for all channels
            np.testing.assert_allclose(integers * weight_scale * data_scale, values, rtol=1e-2, atol=1e-4)


@pytest.mark.sampled(every=4)
def test_every_bias_is_the_nearest_of_its_integers(
    model: Model, quantized: CompressedModel, digits: np.ndarray
) -> None:
    """int32 with the product of the two scales; which scale the layer's input has is read off the DequantizeLinear."""
    deployed = quantized.deployed()
    found, makers = weights(deployed), {out.name: node for node in deployed.ir.graph for out in node.outputs}
    checked = 0
    for node in deployed.ir.graph:
        if node.op_type not in ("Conv", "Gemm", "MatMul") or len(node.inputs) < 3:
            continue
        data, weight, bias = (makers[value.name] for value in node.inputs[:3])
        name = bias.inputs[0].name.removesuffix("_quantized")
        scale = np.float64(found[data.inputs[1].name]) * found[weight.inputs[1].name].astype(np.float64)
        np.testing.assert_allclose(found[bias.inputs[0].name], model.parameters[name] / scale, rtol=2e-7, atol=0.5)
        checked += len(model.parameters[name])
    assert checked > 50


@pytest.mark.sampled(every=3)
def test_it_computes_nearly_the_same(model: Model, quantized: CompressedModel, digits: np.ndarray) -> None:
    name = model.inputs[0].name
    floats, ints = (next(iter(run(m, {name: digits}).values())) for m in (model, quantized.deployed()))
    noise = np.square(floats - ints).mean() / np.square(floats).mean()
    assert noise < 1e-2  # signal to noise above 20 dB, for a network that nobody trained


def test_refresh_of_the_same_parameters_changes_nothing(model: Model, quantized: CompressedModel) -> None:
    deployment = deploy(quantized)
    refresh = refresh_program(deployment, model.parameters)
    fresh = run(refresh, model.parameters)
    found = weights(deployment.predict)
    assert refresh.signature is not None
    tensors = {port.name: port.tensor for port in refresh.signature.outputs}
    assert len(tensors) == 12  # four layers: weight and bias, and the scale of the weight
    for name, values in fresh.items():
        assert values.dtype == found[tensors[name]].dtype
        np.testing.assert_array_equal(values, found[tensors[name]])


@pytest.mark.sampled(every=3)
def test_refresh_is_deploying_again(model: Model, quantized: CompressedModel) -> None:
    rng = np.random.default_rng(0)
    moved = {n: (v + 0.05 * rng.standard_normal(v.shape)).astype(np.float32) for n, v in model.parameters.items()}
    again = weights(quantized.with_parameters(moved).deployed())
    refresh = refresh_program(deploy(quantized), model.parameters)
    fresh = run(refresh, moved)
    assert refresh.signature is not None
    for port in refresh.signature.outputs:
        np.testing.assert_array_equal(fresh[port.name], again[port.tensor], err_msg=port.tensor)
    for name, values in moved.items():
        largest = np.abs(values).max(tuple(range(1, values.ndim)), keepdims=True) / np.float32(127)
        if name.endswith("weight"):
            np.testing.assert_array_equal(fresh[f"{name}_quantized.next"], np.round(values / largest).astype(np.int8))


def test_a_channel_of_zeros_stays_zero(model: Model, quantized: CompressedModel) -> None:
    zeroed = {name: values.copy() for name, values in model.parameters.items()}
    zeroed["conv1.weight"][3] = 0
    fresh = run(refresh_program(deploy(quantized), model.parameters), zeroed)
    assert np.all(fresh["conv1.weight_quantized.next"][3] == 0)
    assert all(np.isfinite(values).all() for values in fresh.values() if values.dtype == np.float32)


def test_refresh_of_a_float_model_is_the_identity(model: Model) -> None:
    refresh = refresh_program(deploy(model), model.parameters)
    fresh = run(refresh, model.parameters)
    for name, values in model.parameters.items():
        np.testing.assert_array_equal(fresh[f"{name}.next"], values)


def test_ranges_are_those_of_the_calibration_data(model: Model, quantized: CompressedModel, digits: np.ndarray) -> None:
    found = weights(quantized)
    name = model.inputs[0].name
    low, high = min(float(digits.min()), 0.0), float(digits.max())
    np.testing.assert_allclose(found[f"{name}.scale"], (high - low) / 255, rtol=1e-6)
    assert found[f"{name}.zero_point"] == round(-low / ((high - low) / 255))


def test_errors_say_what_to_do(model: Model, quantized: CompressedModel, digits: np.ndarray) -> None:
    with pytest.raises(CompressionError, match=r"calibration: the model has the inputs \['input'\], got \['other'\]"):
        compress(model, [StaticInt8()], calibration={"other": np.zeros((1, 1, 28, 28), np.float32)})
    with pytest.raises(CompressionError, match="at least one"):
        compress(model, [StaticInt8()], calibration=np.zeros((0, 1, 28, 28), np.float32))
    with pytest.raises(CompressionError, match="StaticInt8 needs calibration data"):
        compress(model, [StaticInt8()])
    with pytest.raises(CompressionError, match="quantized already"):
        compress(quantized, [StaticInt8()], calibration=digits)
    with pytest.raises(CompressionError, match="no parameter 'ghost'"):
        refresh_program(deploy(model), {"ghost": np.zeros(2, np.float32)})


@pytest.mark.sampled(every=4)
def test_pooling_after_a_float_layer_comes_before_the_rounding(model: Model, digits: np.ndarray) -> None:
    """The same numbers as with the pooling behind it, and ONNX Runtime does not pool integers."""
    quantized = compress(model, [StaticInt8()], calibration=digits)[0]
    deployed = quantized.deployed()
    kinds = [node.op_type for node in deployed.ir.graph]
    assert kinds[:4] == ["Conv", "MaxPool", "Relu", "QuantizeLinear"]
    simulated = [node.op_type for node in quantized.ir.graph if node.op_type in ("Conv", "MaxPool", "Relu")]
    assert simulated[:3] == ["Conv", "Relu", "MaxPool"]
    second = kinds.index("Conv", 1)
    assert kinds.index("Relu", second) < kinds.index("MaxPool", second)  # behind a layer of integers it stays
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    found = {}
    for name, made in (("simulated", quantized), ("deployed", deployed)):
        session = ort.InferenceSession(made.to_bytes(), options, providers=["CPUExecutionProvider"])
        found[name] = session.run(None, {made.inputs[0].name: digits})[0]
    step = np.ptp(found["simulated"]) / 255
    assert np.abs(found["deployed"] - found["simulated"]).max() <= step
