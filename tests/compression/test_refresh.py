"""`refresh` where quantization took BatchNormalization away, froze a part, or chose another form than int8 weights."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn.utils import fusion

from archipel.bundle.roles import State
from archipel.compression import StaticInt8, compress
from archipel.compression.deploy import Deployment, deploy, refresh_program
from archipel.errors import CompressionError
from archipel.graph import Model

Arrays = dict[str, np.ndarray]


def run(model: Model, feeds: Arrays) -> Arrays:
    session = onnxruntime.InferenceSession(model.to_bytes(), providers=["CPUExecutionProvider"])
    names = [port.name for port in session.get_outputs()]
    return dict(zip(names, session.run(names, {port.name: feeds[port.name] for port in session.get_inputs()})))


def weights(model: Model) -> Arrays:
    return {name: value.const_value.numpy() for name, value in model.ir.graph.initializers.items()}


def refreshed(refresh: Model, feeds: Arrays) -> Arrays:
    """By the name of the initializer that is derived."""
    assert refresh.signature is not None
    found = run(refresh, feeds)
    return {port.tensor: found[port.name] for port in refresh.signature.outputs}


def dequantized(found: Arrays, name: str, predict: Model) -> np.ndarray:
    """What the integers called `<name>_quantized` stand for, with the scale that `predict` multiplies them with."""
    tensors = {**weights(predict), **found}
    (node,) = (
        n for n in predict.ir.graph if n.op_type == "DequantizeLinear" and n.inputs[0].name == f"{name}_quantized"
    )
    product = node.inputs[1].producer()
    factors = [node.inputs[1]] if product is None else list(product.inputs)  # of a bias: weight's times activation's
    scale = np.prod(np.broadcast_arrays(*(tensors[str(value.name)].astype(np.float64) for value in factors)), axis=0)
    integers = tensors[f"{name}_quantized"].astype(np.float64)
    return integers * scale.reshape([-1] + [1] * (integers.ndim - 1))


class Folding(nn.Module):
    """BatchNormalization after every kind of layer, after one that has a bias, after a ReLU, and twice in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm1 = nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.depthwise, self.norm2, self.twice = nn.Conv2d(4, 4, 3, groups=4), nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.up, self.norm3 = nn.ConvTranspose2d(4, 6, 2, groups=2), nn.BatchNorm2d(6, eps=1e-2)
        self.alone = nn.BatchNorm2d(6)
        self.dense, self.norm4 = nn.Linear(150, 5, bias=False), nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm1(self.conv(x)))
        x = self.twice(self.norm2(self.depthwise(x)))
        x = self.alone(torch.relu(self.norm3(self.up(x))))
        return self.norm4(self.dense(x.flatten(1)))

    def folded(self) -> Arrays:
        """Weights and biases as PyTorch folds them, which it does not do for a transposed layer in groups."""
        fold = fusion.fuse_conv_bn_eval
        layers = {
            "conv": fold(self.conv, self.norm1),
            "depthwise": fold(fold(self.depthwise, self.norm2), self.twice),
            "dense": fusion.fuse_linear_bn_eval(self.dense, self.norm4),
        }
        return {f"{name}.{part}": getattr(layer, part).detach().numpy() for name, layer in layers.items()
                for part in ("weight", "bias")}  # fmt: skip


def shaken(module: nn.Module, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if name.endswith("var"):
                tensor.uniform_(0.3, 2.0)
            elif tensor.is_floating_point():
                tensor.add_(0.2 * torch.randn_like(tensor))
    return module.eval()


def floats(module: nn.Module) -> Arrays:
    return {name: tensor.numpy() for name, tensor in module.state_dict().items() if tensor.is_floating_point()}


@pytest.fixture(scope="module")
def module() -> Folding:
    torch.set_num_threads(1)
    return shaken(Folding(), 0)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def model(module: Folding) -> Model:
    return Model.from_torch(module, torch.randn(2, 2, 8, 8))


@pytest.fixture(scope="module")
def int8(model: Model) -> Deployment:
    x = np.random.default_rng(0).standard_normal((16, 2, 8, 8), np.float32)
    return deploy(compress(model, [StaticInt8(narrow_convolutions="int8")], calibration=x)[0])


def program(int8: Deployment, model: Model, trainable: Callable[[str], bool] = lambda name: True) -> Model:
    """With the parameters that are trainable as such, and all running statistics as state."""
    parameters = {n: v for n, v in model.parameters.items() if "running" not in n and trainable(n)}
    state = {
        name: State(name=name, tensor=name, dtype="float32", shape=value.shape, lifetime="device", init=name)
        for name, value in model.parameters.items()
        if "running" in name
    }
    return refresh_program(int8, parameters, state)


@pytest.mark.sampled(every=4)
def test_the_same_tensors_change_nothing(model: Model, int8: Deployment) -> None:
    found, there = refreshed(program(int8, model), model.parameters), weights(int8.predict)
    assert {name.split(".")[0] for name in found} == {"conv", "depthwise", "up", "dense", "alone"}
    assert len(found) == 3 * 3 + 2 + 4
    assert (
        found["up.weight_folded_computed"].dtype == np.float32
    )  # DequantizeLinear has no scale for channels of groups
    for name, value in found.items():
        np.testing.assert_array_equal(value, there[name], err_msg=name)


@pytest.mark.sampled(every=6)
def test_moved_tensors_give_what_pytorch_folds(model: Model, int8: Deployment) -> None:
    moved = shaken(Folding(), 7)
    found = refreshed(program(int8, model), floats(moved))
    for name, expected in moved.folded().items():
        layer, part = name.split(".")
        tensor = f"{layer}.weight_folded" + ("_folded" if layer == "depthwise" else "")  # two in a row
        values = dequantized(found, tensor + ("" if part == "weight" else "_bias"), int8.predict)
        step = np.abs(expected).max(tuple(range(1, expected.ndim)), keepdims=True) / 127
        assert np.all(np.abs(values - expected) <= 0.5001 * (step if part == "weight" else 1e-3)), name
    x = torch.randn(2, 4, 3, 3)
    weight, bias = (torch.from_numpy(found[f"up.weight_folded{part}_computed"]) for part in ("", "_bias"))
    with torch.no_grad():
        torch.testing.assert_close(
            nn.functional.conv_transpose2d(x, weight, bias, groups=2), moved.norm3(moved.up(x)), rtol=1e-4, atol=1e-5
        )
    np.testing.assert_array_equal(found["alone.weight"], moved.alone.weight.detach().numpy())


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("part", ["conv.weight", "norm1.weight", "depthwise.bias", "twice.bias", "norm4.*"])
def test_what_is_frozen_enters_as_it_is(model: Model, int8: Deployment, part: str) -> None:
    """Only one part trains: the others, and the statistics, are what the model has."""

    def chosen(name: str) -> bool:
        return name == part or (part.endswith("*") and name.startswith(part[:-1]) and "running" not in name)

    moved = {n: v + 0.3 if chosen(n) else v for n, v in model.parameters.items()}
    everything = refreshed(program(int8, model), moved)
    parameters = {n: v for n, v in model.parameters.items() if chosen(n)}
    found = refreshed(refresh_program(int8, parameters), moved)
    assert found
    for name, value in everything.items():
        if name in found:
            np.testing.assert_array_equal(found[name], value, err_msg=name)
        else:
            np.testing.assert_array_equal(weights(int8.predict)[name], value, err_msg=name)


def plain() -> tuple[Model, Deployment]:
    torch.manual_seed(3)
    dense = Model.from_torch(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)), torch.randn(2, 6))
    x = np.random.default_rng(1).standard_normal((32, 6), np.float32)
    return dense, deploy(compress(dense, [StaticInt8()], calibration=x)[0])


@pytest.mark.sampled(every=3)
def test_a_frozen_bias_follows_the_scale_of_its_weight() -> None:
    dense, int8 = plain()
    only = {name: value for name, value in dense.parameters.items() if name.endswith("weight")}
    found = refreshed(refresh_program(int8, only), {name: 5 * value for name, value in only.items()})
    for layer in ("0", "2"):
        np.testing.assert_allclose(
            dequantized(found, f"{layer}.bias", int8.predict), dense.parameters[f"{layer}.bias"], rtol=0, atol=1e-3
        )


@pytest.mark.sampled(every=3)
def test_a_bias_alone_may_train() -> None:
    dense, int8 = plain()
    only = {name: value for name, value in dense.parameters.items() if name.endswith("bias")}
    moved = {name: value + 1 for name, value in only.items()}
    found = refreshed(refresh_program(int8, only), moved)
    assert {f"{n}.bias_quantized" for n in (0, 2)} < set(found)
    for name in set(found) - {f"{n}.bias_quantized" for n in (0, 2)}:
        # The weights' scale looks at the bias, which must fit, and here it does.
        np.testing.assert_array_equal(found[name], weights(int8.predict)[name], err_msg=name)
    for name, value in moved.items():
        np.testing.assert_allclose(dequantized(found, name, int8.predict), value, rtol=0, atol=1e-3)


@pytest.mark.sampled(every=3)
def test_a_bias_over_weights_of_nearly_nothing_fits() -> None:
    """A channel that decayed to 1e-12 would leave its bias a scale in which int32 ends at 1e-5."""
    dense, int8 = plain()
    moved = {name: value.copy() for name, value in dense.parameters.items()}
    moved["0.weight"][1] *= 1e-12
    moved["0.bias"][:] = [0.25, -0.75, 1.5, 0.0]
    found = refreshed(refresh_program(int8, moved), moved)
    np.testing.assert_allclose(dequantized(found, "0.bias", int8.predict), moved["0.bias"], atol=1e-3)
    assert np.abs(dequantized(found, "0.weight", int8.predict)[1]).max() < 1e-6


@pytest.mark.parametrize(
    "layer",
    ["Gemm <beta = 2.0> (x, w, b)", "Gemm (x, w, row)", "LayerNormalization (x, b, b)"],
    ids=["beta", "row", "layer norm"],
)
def test_what_the_quantizer_would_get_wrong_stays_float(layer: str) -> None:
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]>
        agraph (float[n, 3] x) => (float[n, 3] y)
        <float[3, 3] w = {{1, 2, 3, 4, 5, 6, 7, 8, 9}}, float[3] b = {{1, -2, 3}}, float[1, 3] row = {{1, -2, 3}}>
        {{ a = {layer} y = Relu (a) }}"""
    )
    model = Model.from_proto(proto)
    x = np.random.default_rng(0).standard_normal((16, 3), np.float32)
    with pytest.raises(CompressionError, match="no Conv, ConvTranspose, Gemm or MatMul to quantize"):
        compress(model, [StaticInt8()], calibration=x)
