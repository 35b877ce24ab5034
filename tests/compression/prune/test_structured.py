"""Pruning real networks: the zoo, models from elsewhere, and the part of a recipe."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from archipel import Model, datasets, models, training
from archipel.compression import CompressedModel, Examples, FineTune, Work
from archipel.compression.prune import PruneChannels, channel_groups, remove_channels
from archipel.errors import CompressionError
from archipel.graph import Builder, check_model
from archipel.graph.flops import flops_per_example
from archipel.graph.opset import IR_VERSION, OPSET
from archipel.graph.parameters import record_parameters

from .measured import half, run, zeroed
from .networks import Network

DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "onnx_models"


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).standard_normal(shape).astype(np.float32)


TEXT = np.random.default_rng(3).integers(0, 80, (2, 12))

# Network, input, the layers whose outputs stay: those of the model, and in a transformer what is normalized.
ZOO: dict[str, tuple[Callable[[], nn.Module], np.ndarray, set[str]]] = {
    "MLP": (lambda: models.mlp(0), noise(2, 784), {"output"}),
    "LeNet": (lambda: models.lenet(0), noise(2, 1, 28, 28), {"output"}),
    "FedAvg CNN": (lambda: models.fedavg_cnn(0), noise(2, 1, 28, 28), {"output"}),
    "digits CNN": (lambda: models.digits_cnn(0), noise(2, 1, 28, 28), {"output"}),
    "ResNet-8": (lambda: models.resnet8(0), noise(2, 3, 32, 32), {"output"}),
    "DS-CNN": (lambda: models.ds_cnn(0), noise(2, 1, 49, 10), {"output"}),
    "MobileNetV2": (lambda: models.mobilenet_v2(0, width=0.25), noise(2, 3, 32, 32), {"output"}),
    "1D-CNN": (lambda: models.cnn_1d(0), noise(2, 6, 128), {"output"}),
    "LSTM": (lambda: models.char_rnn(0, hidden=16), TEXT, {"decoder"}),
    "GRU": (lambda: models.char_rnn(0, "gru", hidden=16), TEXT, {"decoder"}),
    "Transformer": (
        lambda: models.transformer(0, length=12, width=32), TEXT,
        {"tokens", "decoder", *(f"layers.{i}.{name}" for i in (0, 1) for name in ("project", "narrow"))},
    ),
    "autoencoder": (lambda: models.autoencoder(0), noise(2, 1, 28, 28), {"decode2"}),
    "U-Net": (lambda: models.unet(0), noise(2, 1, 28, 28), {"output"}),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def lively(module: nn.Module) -> nn.Module:
    """Give BatchNormalization something to do."""
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.uniform_(-0.2, 0.2)
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.uniform_(layer.bias, -0.3, 0.3)
    return module


def channels(module: nn.Module, but: set[str]) -> int:
    """Rows of the weights of all layers that make channels, recurrent matrices included."""
    total = 0
    for name, layer in module.named_modules():
        if name in but:
            continue
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.ConvTranspose2d):
            total += layer.out_channels
        elif isinstance(layer, nn.Linear):
            total += layer.out_features
        elif isinstance(layer, nn.Embedding):
            total += layer.embedding_dim
        elif isinstance(layer, nn.LSTM | nn.GRU):
            total += sum(len(p) for n, p in layer.named_parameters() if n.startswith("weight"))
    return total


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_every_network_of_the_zoo(name: str) -> None:
    make, example, stay = ZOO[name]
    module = lively(make())
    model = Model.from_torch(module, example)
    groups = channel_groups(model)
    assert sum(m.indices.size for g in groups for m in g.members if m.role == "weight") == channels(module, stay)
    compare(model, {model.inputs[0].name: example})


def compare(model: Model, feed: dict[str, np.ndarray]) -> None:
    groups = channel_groups(model)
    drop = half(groups)
    small = remove_channels(model, drop)
    check_model(small.ir)
    assert (small.inputs, small.outputs) == (model.inputs, model.outputs)
    assert set(small.parameter_names) == set(model.parameter_names)
    assert flops_per_example(small) < 0.8 * flops_per_example(model)
    original = run(model, feed)
    for before, expected, found in zip(original, run(zeroed(model, groups, drop), feed), run(small, feed)):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
        assert np.abs(before - expected).max() > 1e-3 * np.abs(before).max()


@pytest.mark.parametrize("name", ["opt_mnist", "cifar10_cnn_winml", "ultraface_rfb_320"])
@pytest.mark.sampled(every=8)
def test_models_from_elsewhere(name: str) -> None:
    if not DATA.is_dir():
        if os.environ.get("CI") == "true":
            pytest.fail(f"needs the pretrained models in {DATA}")
        pytest.skip(f"needs the pretrained models in {DATA}")
    with np.load(DATA / f"{name}.ref.npz") as file:
        reference = dict(file)
    model = Model.from_onnx(DATA / f"{name}.onnx")
    compare(model, {port.name: reference[f"in:{port.name}"][:1] for port in model.inputs})


def graph_of(build: Callable[[Network], None], *shape: int) -> Model:
    """What `build` makes of the input x, whose first axis is the batch."""
    net = Network.__new__(Network)
    net.rng = np.random.default_rng(0)
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="by_hand")
    net.op, net.older = Builder(graph), []
    net.x = net.op.input("x", ir.DataType.FLOAT, ["batch", *shape])
    build(net)
    net.op.name_output(net.x, "y")
    return Model(ir.Model(graph, ir_version=IR_VERSION))


def test_flops_of_convolutions_by_hand() -> None:
    def build(net: Network) -> None:
        net.x = net.op.Relu(net.op.Conv(net.x, net.weight(12, 3, 3, 3), pads=[1, 1, 1, 1]))
        net.x = net.op.Relu(net.op.Conv(net.x, net.weight(12, 1, 3, 3), pads=[1, 1, 1, 1], group=12))
        net.x = net.op.Relu(net.op.Conv(net.x, net.weight(10, 12, 1, 1)))
        net.x = net.op.Gemm(net.op.Flatten(net.x), net.weight(5, 640), transB=1)

    def count(a: int, b: int) -> int:
        return 2 * (64 * 9 * 3 * a + 64 * 9 * a + 64 * a * b + 64 * b * 5)

    model = graph_of(build, 3, 8, 8)
    assert flops_per_example(model) == count(12, 10)
    assert flops_per_example(remove_channels(model, {"w": [0, 2, 11], "w_3": [7, 8]})) == count(9, 8)


def test_flops_of_an_lstm_by_hand() -> None:
    def build(net: Network) -> None:
        steps = net.op.Transpose(net.x, perm=[1, 0, 2])
        weights = [net.weight(1, 24, 5), net.weight(1, 24, 6), net.weight(1, 48)]
        y = net.op.LSTM(steps, *weights, hidden_size=6)
        net.x = net.op.MatMul(net.op.Squeeze(y, [1]), net.weight(6, 4))

    model = graph_of(build, 7, 5)
    small = remove_channels(model, {"w": [1, 4]})
    for found, hidden in ((model, 6), (small, 4)):
        assert flops_per_example(found) == 7 * 2 * (4 * hidden * 5 + 4 * hidden * hidden + hidden * 4)


@pytest.fixture(scope="module")
def digits() -> tuple[CompressedModel, Examples, Examples]:
    """A network that has learned a little of real handwriting, and examples to prune and to judge it with."""
    found = datasets.digits_by_writer()
    x, y = found.inputs()[:3000], found.targets()[:3000]
    module = models.digits_cnn(0)
    optimizer = torch.optim.Adam(module.parameters(), 2e-3)
    for start in range(0, 2432, 64):
        optimizer.zero_grad()
        logits = module(torch.from_numpy(x[start : start + 64]))
        nn.functional.cross_entropy(logits, torch.from_numpy(y[start : start + 64])).backward()
        optimizer.step()
    model = CompressedModel.of(Model.from_torch(module, x[:2]))
    name = model.inputs[0].name
    return model, Examples({name: x[:2432]}, y[:2432]), Examples({name: x[2432:]}, y[2432:])


def work_of(digits: tuple[CompressedModel, Examples, Examples]) -> Work:
    model, data, validation = digits
    return Work(model, loss=training.losses.cross_entropy(), data=data, calibration=data, validation=validation)


@pytest.mark.parametrize("part", [
    PruneChannels(flops=0.5, examples=128), PruneChannels(flops=0.3, criterion="l2", scope="layer", round_to=1),
    PruneChannels(size=0.5, criterion="l1"), PruneChannels(size=0.5, examples=128, iterations=2),
], ids=str)  # fmt: skip
@pytest.mark.sampled(every=5)
def test_a_goal_is_reached_and_hardly_overshot(part: PruneChannels, digits: tuple) -> None:
    model, work = digits[0], work_of(digits)
    small = part.apply(model, work)
    share = part.flops or part.size
    measure = flops_per_example if part.flops else lambda m: sum(p.nbytes for p in m.parameters.values())
    left = measure(small) / measure(model)
    assert 1 - share - 0.12 < left <= 1 - share
    assert isinstance(small, CompressedModel)
    assert (small.inputs, small.outputs) == (model.inputs, model.outputs)
    assert (work.facts["before"], work.facts["after"]) == (measure(model), measure(small))
    for name, units in work.facts["units"].items():
        assert units["after"] == small.parameters[name].shape[0]
        assert units["after"] % part.round_to == 0 or units["after"] == units["before"]


def test_a_share_of_the_units_and_what_is_excluded(digits: tuple) -> None:
    part = PruneChannels(ratio=0.25, criterion="l2", exclude=("conv1.*",), round_to=1)
    small = part.apply(digits[0], work_of(digits))
    shapes = {name: value.shape[0] for name, value in small.parameters.items() if name.endswith("weight")}
    assert shapes["conv1.weight"] == 8
    assert shapes["conv2.weight"] + shapes["hidden.weight"] == 60


@pytest.mark.sampled(every=3)
def test_taylor_finds_channels_that_do_nothing(digits: tuple) -> None:
    """Channels whose consumers ignore them have no gradient, large as their weights may be."""
    model, data, validation = digits
    ignored = model.parameters["conv2.weight"].copy()
    ignored[:, [1, 3, 4, 6]] = 0
    mute = model.with_parameters({"conv2.weight": ignored})
    work = work_of((mute, data, validation))
    part = PruneChannels(ratio=0.5, exclude=("conv2.*", "hidden.*"), examples=64, round_to=1)
    small = part.apply(mute, work)
    kept = model.parameters["conv1.weight"][[0, 2, 5, 7]]
    np.testing.assert_array_equal(small.parameters["conv1.weight"], kept)
    assert work.evaluate(small).accuracy == work.evaluate(mute).accuracy


@pytest.mark.slow
def test_fine_tuning_brings_back_what_pruning_took(digits: tuple) -> None:
    model, work = digits[0], work_of(digits)
    tune = FineTune(steps=40, batch_size=64, lr=2e-3)
    before = work.evaluate(PruneChannels(flops=0.5, examples=256).apply(model, work))
    after = work.evaluate(PruneChannels(flops=0.5, examples=256, fine_tune=tune).apply(model, work))
    assert after.loss < before.loss


def test_errors(digits: tuple) -> None:
    model = digits[0]
    with pytest.raises(CompressionError, match="exactly one of ratio, flops, size, latency, got flops, size"):
        PruneChannels(flops=0.5, size=0.5)
    with pytest.raises(CompressionError, match="flops must lie between 0 and 1"):
        PruneChannels(flops=1.5)
    with pytest.raises(CompressionError, match="criterion is one of taylor, l1, l2, got 'random'"):
        PruneChannels(flops=0.5, criterion="random")  # type: ignore[arg-type]
    with pytest.raises(CompressionError, match="iterations must be a whole number from 1, is 0"):
        PruneChannels(flops=0.5, iterations=0)
    with pytest.raises(CompressionError, match="PruneChannels: iterations must be a whole number from 1, is True"):
        PruneChannels(flops=0.5, iterations=True)
    with pytest.raises(CompressionError, match="FineTune: steps must be a whole number from 1, is True"):
        PruneChannels(flops=0.5, fine_tune=FineTune(steps=True))
    with pytest.raises(CompressionError, match="cannot be reached: with keep=0"):
        PruneChannels(flops=0.5, criterion="l1", keep=0.9).apply(model, work_of(digits))
    with pytest.raises(CompressionError, match=r"exclude 'ghost\*' matches no parameter"):
        PruneChannels(flops=0.5, criterion="l1", exclude=("ghost*",)).apply(model, work_of(digits))
    lone = graph_of(lambda net: setattr(net, "x", net.op.MatMul(net.x, net.weight(4, 4))), 4)
    with pytest.raises(CompressionError, match=r"no channels that can be removed .*output 'y' of the model"):
        PruneChannels(flops=0.5, criterion="l1").apply(CompressedModel.of(lone), work_of(digits))
    with pytest.raises(CompressionError, match="PruneChannels needs training data"):
        PruneChannels(flops=0.5).apply(model, Work(model, loss=training.losses.cross_entropy()))


@pytest.mark.sampled(every=4)
def test_a_latency_is_measured(digits: tuple) -> None:
    """A wide network, whose time is not all overhead."""

    def build(net: Network) -> None:
        for _ in range(3):
            net.x = net.op.Relu(net.op.Conv(net.x, net.weight(64, net.width, 3, 3), pads=[1, 1, 1, 1]))
        net.x = net.op.Gemm(net.op.Flatten(net.op.GlobalAveragePool(net.x)), net.weight(5, 64), transB=1)

    model = CompressedModel.of(graph_of(build, 3, 24, 24))
    work = Work(model, loss=training.losses.cross_entropy(), calibration=Examples({"x": noise(4, 3, 24, 24)}))
    small = PruneChannels(latency=0.4, criterion="l2").apply(model, work)
    assert flops_per_example(small) < 0.8 * flops_per_example(model)
    assert work.facts["after"] < work.facts["before"]


def test_masked_and_quantized_weights_come_later(digits: tuple) -> None:
    def build(net: Network) -> None:
        weight = net.op.Mul(net.weight(8, 4), np.eye(8, 4, dtype=np.float32))
        net.x = net.op.MatMul(net.op.MatMul(net.x, net.op.Transpose(weight, perm=[1, 0])), net.weight(8, 3))

    masked = graph_of(build, 4)
    record_parameters(masked.ir, ["w", "w_2"])
    with pytest.raises(CompressionError, match="'w' has a mask already; put PruneChannels before"):
        PruneChannels(flops=0.5, criterion="l1").apply(CompressedModel.of(masked), work_of(digits))
    quantized = CompressedModel(digits[0].copy().ir, training_form=digits[0])
    with pytest.raises(CompressionError, match="put PruneChannels before quantization"):
        PruneChannels(flops=0.5, criterion="l1").apply(quantized, work_of(digits))
